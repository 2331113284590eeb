"""Two trainer processes use one Redis, by mistake or after a sleep. Only one of them reads the stream."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import Outcome
from rollout_queue.redis import keys
from rollout_queue.redis.lease.holder import Holder
from rollout_queue.redis.lease.lease import LOST
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port
from tests.support.trainer_service.rank_pair import RankPair
from tests.support.trainer_service.rank_tasks import Program
from tests.support.waiting import wait_until

LEASE_S = 8.0
"""A busy machine may let a process wait for seconds, and its lease must outlast that."""


class Process:
    """`python -m trainer_service`, forked, with a checkpoint directory of its own."""

    def __init__(self, pair: RankPair, directory: Path, name: str, model_path: Path, redis_url: str) -> None:
        self.checkpoints = directory / name / "checkpoints"
        self.log = directory / f"{name}.log"
        settings = {
            "WEIR_REDIS_URL": redis_url,
            "WEIR_MODEL_PATH": str(model_path),
            "WEIR_TRAINER__CHECKPOINT_DIR": str(self.checkpoints),
            "WEIR_TRAINER__POLICIES_DIR": str(directory / name / "policies"),
            "WEIR_TRAINER__PORT": str(free_port()),
            "WEIR_TRAINER__LEASE_S": str(LEASE_S),
            "WEIR_TRAINER__THREADS": "1",
            "WEIR_TRAINER__DEVICE": "cpu",
        }
        self._pair = pair
        self._place = pair.run([Program(settings, self.log)])
        (self._process,) = pair.ranks(self._place)
        self.pid = self._process.pid

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def ends(self) -> int:
        (status,) = self._pair.ended(self._place)
        return status

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if not self._pair.has_ended(self._place):
            self._process.kill()
            self.ends()

    def takes_up_the_stream(self) -> None:
        wait_until(lambda: "pending entries" in self.said or self._pair.has_ended(self._place))
        assert not self._pair.has_ended(self._place), self.said


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        client.flushdb()
        yield client


@pytest.fixture
def start(
    pair: RankPair, tmp_path: Path, model_path: Path, redis: Redis, redis_url: str
) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def begin(name: str) -> Process:
        started.append(Process(pair, tmp_path, name, model_path, redis_url))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def holder(redis: Redis) -> int | None:
    """The pid of the process that holds the lease."""
    packed: Any = redis.get(keys.LEASE)
    return msgspec.json.decode(packed, type=Holder).pid if packed else None


def pending(redis: Redis) -> int:
    summary: Any = redis.xpending(keys.STREAM, keys.GROUP)
    return int(summary["pending"])


def append(redis: Redis, session_id: str) -> None:
    """A session that ends without reward: the trainer holds its entry, and never acknowledges it."""
    record = Outcome(session_id=session_id, status="completed", created_at=time.time())
    redis.hset(keys.session(session_id), "spec", b"")
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(record)})


def test_of_two_trainers_one_refuses_and_one_that_slept_ends(
    start: Callable[[str], Process], redis: Redis
) -> None:
    first, second = start("first"), start("second")
    wait_until(lambda: holder(redis))
    if holder(redis) == second.pid:
        first, second = second, first
    assert second.ends() == 1
    assert f"another trainer holds {keys.LEASE}: " in second.said
    assert f":{first.pid}, since " in second.said
    assert "Traceback" not in second.said
    first.takes_up_the_stream()
    append(redis, "before")
    wait_until(lambda: pending(redis) == 1)

    first.signal(signal.SIGSTOP)
    third = start("third")
    third.takes_up_the_stream()
    assert holder(redis) == third.pid
    third.signal(signal.SIGSTOP)  # from here on, only the first could take entries
    entries_before = redis.xrange(keys.STREAM)
    append(redis, "after")
    first.signal(signal.SIGCONT)
    assert first.ends() == 1
    assert first.said.splitlines()[-1] == LOST
    assert "Traceback" not in first.said
    assert pending(redis) == 1
    left: Any = redis.xrange(keys.STREAM)
    assert left[:-1] == entries_before
    assert not redis.exists(keys.VERDICTS)
    assert not (first.checkpoints / "CURRENT").exists()
    third.signal(signal.SIGCONT)
    wait_until(lambda: pending(redis) == 2)
