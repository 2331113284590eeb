"""Writes agents' episodes into a real Redis, as gateways do."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Turn
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.redis.session_retention import RedisForgetter
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.redis_clients import async_redis_at
from tests.support.trainer_service.harness import turn


class RedisAgents:
    """Writes episodes into a Redis as gateways do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, session_id: str, group: tuple[str, int]) -> None:
        spec = SessionSpec(session_id=session_id, created_at=100.0, group_id=group[0], group_size=group[1])
        self._write(lambda writer: writer.open_session(spec))

    def episode(
        self, session_id: str, value: float | None, group: tuple[str, int | None] | None = None, **ending: Any
    ) -> None:
        """A session of two turns, one after the other; finished if a reward or an ending is given."""
        group_id, size = group or (None, None)
        where: dict[str, Any] = {"session_id": session_id, "group_id": group_id, "group_size": size}
        verdict = ending.pop("verdict", None)

        async def write(writer: StreamWriter) -> None:
            await writer.open_session(SessionSpec(created_at=100.0, **where))
            for each in turns_of(session_id, group_id):
                await writer.append_turn(each, expires_at=1e12)
            if value is not None or ending:
                outcome = Outcome(created_at=103.0, **({"status": "completed"} | where | ending))
                await writer.append_outcome(outcome, _reward(session_id, value, 103.0), verdict)

        self._write(write)

    def group(self, group_id: str, values: Sequence[float]) -> None:
        for index, value in enumerate(values):
            self.episode(f"{group_id}-{index}", value, (group_id, len(values)))

    def reward(self, session_id: str, value: float) -> None:
        """A further reward, which arrives late."""
        reward = Reward(session_id=session_id, value=value, key="more", created_at=104.0)
        self._write(lambda writer: writer.append_reward(reward))

    def finish(self, session_id: str, value: float, group: tuple[str, int]) -> None:
        where: dict[str, Any] = {"session_id": session_id, "group_id": group[0], "group_size": group[1]}
        outcome = Outcome(status="completed", created_at=104.0, **where)
        self._write(lambda writer: writer.append_outcome(outcome, _reward(session_id, value, 104.0), None))

    def delete(self, session_id: str) -> None:
        assert self._do(lambda redis: StreamDeleter(redis).delete_session(session_id)) is not None

    def forget(self) -> dict[str, int]:
        """Forget settled sessions, as a gateway does after a while. Returns their number by verdict."""
        return dict(self._do(lambda redis: RedisForgetter(redis).forget(0.0, 100)).verdicts)

    def _write(self, write: Callable[[StreamWriter], Awaitable[object]]) -> None:
        async def written(redis: Redis) -> None:
            writer = StreamWriter(redis)
            await write(writer)
            await writer.close()

        self._do(written)

    def _do(self, call: Callable[[Redis], Awaitable[Any]]) -> Any:
        async def done() -> Any:
            async with async_redis_at(self._url) as redis:
                return await call(redis)

        return asyncio.run(done())


def _reward(session_id: str, value: float | None, at: float) -> Reward | None:
    if value is None:
        return None
    return Reward(session_id=session_id, value=value, key="finish", created_at=at)


def turns_of(session_id: str, group_id: str | None = None) -> list[Turn]:
    first, second = f"{session_id}-t1", f"{session_id}-t2"
    named = {"group_id": group_id, "completion_id": f"chatcmpl-{session_id}"}
    then = {"parent_id": first, "context_ids": [5], "output_ids": [12, 1], "started_at": 101.0}
    return [turn(session_id, first, started_at=100.0, **named), turn(session_id, second, **then, **named)]
