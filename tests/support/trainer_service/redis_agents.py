"""Writes agents' episodes into a real Redis, as gateways do."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Turn
from rollout_queue.redis.writer import RedisWriter
from tests.support.redis_clients import async_redis_at
from tests.support.serving import free_port
from tests.support.trainer_service.harness import turn

NOBODY = f"http://127.0.0.1:{free_port()}"
"""The address of a trainer that is not running, so that the audit reads the ledger from its checkpoints."""


class RedisAgents:
    """Writes episodes into a Redis as gateways do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def episode(
        self, session_id: str, value: float | None, group: tuple[str, int] | None = None, **ending: Any
    ) -> None:
        """A session of two turns, one after the other; finished if a reward or an ending is given."""
        group_id, size = group or (None, None)
        where: dict[str, Any] = {"session_id": session_id, "group_id": group_id, "group_size": size}
        asyncio.run(self._episode(SessionSpec(created_at=100.0, **where), value, ending, where))

    async def _episode(
        self, spec: SessionSpec, value: float | None, ending: dict[str, Any], where: dict[str, Any]
    ) -> None:
        redis = async_redis_at(self._url)
        writer = RedisWriter(redis)
        verdict = ending.pop("verdict", None)
        await writer.open_session(spec)
        for each in turns_of(spec.session_id, spec.group_id):
            await writer.append_turn(each, expires_at=1e12)
        if value is not None or ending:
            reward = None if value is None else Reward(
                session_id=spec.session_id, value=value, key="finish", created_at=103.0
            )  # fmt: skip
            outcome = Outcome(created_at=103.0, **({"status": "completed"} | where | ending))
            await writer.append_outcome(outcome, reward, verdict)
        await writer.close()
        await redis.aclose()

    def group(self, group_id: str, values: Sequence[float]) -> None:
        for index, value in enumerate(values):
            self.episode(f"{group_id}-{index}", value, (group_id, len(values)))


def turns_of(session_id: str, group_id: str | None = None) -> list[Turn]:
    first, second = f"{session_id}-t1", f"{session_id}-t2"
    named = {"group_id": group_id, "completion_id": f"chatcmpl-{session_id}"}
    return [
        turn(session_id, first, started_at=100.0, **named),
        turn(
            session_id,
            second,
            parent_id=first,
            context_ids=[5],
            output_ids=[12, 1],
            started_at=101.0,
            **named,
        ),
    ]
