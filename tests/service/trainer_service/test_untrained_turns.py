"""A trainer by commands ends the sessions of agents: their entries do not stay in the stream."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from rollout_queue.contract.records import Outcome, SessionSpec, Verdict
from rollout_queue.redis import keys
from rollout_queue.redis.lease.lease import Lease
from rollout_queue.redis.reader import RedisReader
from rollout_queue.redis.writer import RedisWriter
from tests.support.queue.records import turn
from tests.support.redis_clients import async_redis_at, redis_at
from trainer_service.commands.untrained_turns import NOT_BY_TURNS, UntrainedTurns
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = redis_at(redis_url)
    client.flushdb()
    yield client
    client.close()


async def test_sessions_end_untrained_and_leave_the_stream(redis: Redis, redis_url: str) -> None:
    client = async_redis_at(redis_url)
    writer = RedisWriter(client)
    lease = Lease(redis, 30)
    assert lease.claim() is None
    heartbeat = Heartbeat(RedisReader(redis, lease.token), SharedState(), 0.1)
    verdict = Verdict(code="failed", detail="its own")
    for name, own in (("a", None), ("b", verdict), ("c", None)):
        await writer.open_session(SessionSpec(session_id=name, created_at=time.time()))
        await writer.append_turn(turn(f"t-{name}", name), time.time() + 60)
        if name != "c":
            outcome = Outcome(session_id=name, status="completed", created_at=time.time())
            await writer.append_outcome(outcome, None, own)
    reader = RedisReader(redis, lease.token)
    assert len(reader.read(2, 0)) == 2, "a process that died had read two"
    UntrainedTurns(RedisReader(redis, lease.token), heartbeat).settle()
    assert redis.xlen(keys.STREAM) <= 1, "the last delivered entry stays"
    pending: Any = redis.xpending(keys.STREAM, keys.GROUP)
    assert pending["pending"] == 0
    heads = {name: await writer.load(name) for name in "abc"}
    assert {name: head and head.verdict for name, head in heads.items()} == {
        "a": NOT_BY_TURNS,
        "b": verdict,
        "c": None,
    }
    for name, head in heads.items():
        assert head is not None
        assert head.turn_verdicts == {f"t-{name}": NOT_BY_TURNS}
    await writer.close()
    await client.aclose()
