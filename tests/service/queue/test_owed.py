"""What a trainer owes is acknowledged in pages of a bounded size, and it may be killed between any two."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis

from bench.owed import found, plant
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from tests.support.claimed import claimed_reader
from tests.support.queue.ends import NOTHING
from tests.support.redis_clients import redis_at
from trainer_service.groups.acknowledgement import AcknowledgedTurn, Acknowledgement
from trainer_service.heartbeat import Heartbeat
from trainer_service.intake import Acknowledger
from trainer_service.shared_state import SharedState
from trainer_service.trainer_metrics import TrainerMetrics

TURNS = 3000
MOST_ARGUMENTS = 6 * 250 + 350
"""Six arguments a verdict, and one a session."""
STALE = Verdict(code="stale")


class Killed(BaseException):
    """Ends a trainer between two scripts."""


class KilledTrainer:
    """A trainer that ends before its script number `at`, and what it has sent until then."""

    def __init__(self, redis: Redis, at: int | None = None) -> None:
        self.redis, self.at = redis, at
        self.sizes = list[int]()
        self.stream = stream = claimed_reader(redis)
        run = redis.evalsha

        def noting(*given: Any) -> Any:
            if len(self.sizes) == self.at:
                raise Killed
            self.sizes.append(len(given))
            return run(*given)

        redis.evalsha = noting  # type: ignore[assignment,method-assign]
        heartbeat, metrics = Heartbeat(stream, SharedState(), 0.1), TrainerMetrics(CollectorRegistry())
        heartbeat.beat = lambda *_: None  # type: ignore[method-assign] # its reports are scripts as well
        self.acknowledger = Acknowledger(stream, heartbeat, metrics)

    def resume(self, owed: Acknowledgement) -> bool:
        """Start from a checkpoint that owes this. Returns whether it lived."""
        pending: Any = self.redis.xpending_range(key_names.STREAM, key_names.GROUP, "-", "+", 10 * TURNS)
        try:
            self.acknowledger.resume(owed, {each["message_id"].decode() for each in pending})
        except Killed:
            return False
        return True


@pytest.fixture
def clients(redis_url: str) -> Iterator[list[Redis]]:
    """One for each of the trainers of a test."""
    made = [redis_at(redis_url) for _ in range(120)]
    made[0].flushdb()
    yield made
    for each in made:
        each.close()


def test_a_trainer_that_is_killed_between_any_two_scripts_loses_nothing_and_counts_nothing_twice(
    clients: list[Redis],
) -> None:
    for killed_at in count(1):
        clients[0].flushdb()
        owed = plant(clients[0], TURNS)
        trainer = KilledTrainer(clients.pop(), killed_at)
        lived = trainer.resume(owed)
        assert lived or KilledTrainer(clients.pop()).resume(owed)
        claimed_reader(clients[0]).acknowledge([], NOTHING)  # the next one frees what this one left
        found(clients[0]).check(TURNS)
        if lived:
            break
    assert killed_at > 2 * TURNS // 250
    assert max(trainer.sizes) <= MOST_ARGUMENTS


@pytest.mark.parametrize("sessions", [500, 1500])
def test_many_groups_end_in_pages_and_a_group_of_up_to_512_sessions_ends_as_a_whole(
    clients: list[Redis], sessions: int
) -> None:
    """The sessions have five turns each. The rest of a group of which one has a verdict would be late."""
    names = [f"s{number}" for number in range(sessions)]
    for name in names:
        clients[0].hset(key_names.session(name), "spec", b"")
    turns = [AcknowledgedTurn(name, f"t{number}", STALE) for name in names for number in range(5)]
    size = 500
    groups = [
        Acknowledgement(
            [], dict.fromkeys(names[first : first + size], STALE), turns[5 * first : 5 * first + 5 * size]
        )
        for first in range(0, sessions, size)
    ]
    trainer = KilledTrainer(clients.pop())
    whole = list[bool]()

    def noting(*given: Any, run: Any = trainer.redis.evalsha) -> Any:
        reply = run(*given)
        whole.append(int(clients[0].hget(key_names.VERDICTS, "session:stale") or 0) % size == 0)
        return reply

    trainer.redis.evalsha = noting  # type: ignore[assignment,method-assign]
    trainer.acknowledger.end(groups, [], [])
    assert all(whole)
    assert max(trainer.sizes) <= 7 * 512 + 20
    assert clients[0].hgetall(key_names.VERDICTS) == {
        b"session:stale": b"%d" % sessions,
        b"turn:stale": b"%d" % len(turns),
    }


def test_what_a_page_holds_is_bounded_in_bytes(clients: list[Redis]) -> None:
    """A turn of 100,000 tokens has a megabyte of numbers."""
    clients[0].hset(key_names.session("s"), "spec", b"")
    trained = {("s", f"t{number}"): Verdict(code="trained", step=1, version=1) for number in range(20)}
    trainer = KilledTrainer(clients.pop())
    sizes = list[int]()

    def noting(*given: Any, run: Any = trainer.redis.evalsha) -> Any:
        sizes.append(sum(len(each) for each in given if isinstance(each, bytes)))
        return run(*given)

    trainer.redis.evalsha = noting  # type: ignore[assignment,method-assign]
    numbers = bytes(400_000)
    trainer.stream.acknowledge([], Verdicts({}, trained, dict.fromkeys(trained, numbers)))
    assert max(sizes) < 2**20 + len(numbers)
    assert sum(sizes) > 20 * len(numbers)
