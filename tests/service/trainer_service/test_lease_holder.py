"""How a process claims the trainer's lease, and what it does when it has lost the lease."""

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Event, Semaphore, Thread, Timer

import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.redis import keys
from rollout_queue.redis.lease.holder import Holder
from rollout_queue.redis.lease.lease import Lease
from tests.support.redis_clients import redis_at
from tests.support.trainer_service.harness import MakeHarness
from trainer_service.status.lease_holder import keep_lease
from trainer_service.status.shared_state import SharedState

RETRY_S = 0.01


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        client.flushdb()
        yield client


class Watched(Lease):
    """A lease whose renewals can be waited for."""

    def __init__(self, redis: Redis, lease_s: float) -> None:
        super().__init__(redis, lease_s)
        self.renewals = Semaphore(0)

    def renew(self) -> None:
        super().renew()
        self.renewals.release()


def leave_a_lease(redis: Redis, lease_s: float) -> None:
    """Claim a lease and never renew it, like a trainer that crashed on another machine."""
    holder = msgspec.structs.replace(Holder.here(), host="far", pid=7, place="another boot")
    redis.set(keys.LEASE, msgspec.json.encode(holder), px=int(lease_s * 1000))


def test_a_lease_is_renewed_as_long_as_it_is_held_and_then_released(redis: Redis) -> None:
    lease = Watched(redis, 1.5)
    with keep_lease(lease, SharedState(), RETRY_S) as held:
        assert held
        for _ in range(4):  # so many renewals take longer than one lease lasts
            assert lease.renewals.acquire(timeout=300)
        assert redis.exists(keys.LEASE)
    assert not redis.exists(keys.LEASE)


def test_a_trainer_waits_until_the_lease_of_a_crashed_one_expires(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1.0)
    started = time.monotonic()
    with keep_lease(Lease(redis, 0.3), SharedState(), RETRY_S) as held:
        assert held
        assert 0.9 < time.monotonic() - started < 60, "the lease expired, and the trainer noticed"
    assert f"{keys.LEASE} belongs to far:7, since 20" in caplog.text
    assert re.search(r"unless renewed, it expires in (1\.0|0\.\d) s", caplog.text)


def test_a_trainer_ends_if_another_one_renews_the_lease(redis: Redis) -> None:
    leave_a_lease(redis, 1.2)
    ended = Event()

    def renew() -> None:
        while not ended.wait(0.1):
            redis.pexpire(keys.LEASE, 1200)

    other = Thread(target=renew)
    other.start()
    try:
        with pytest.raises(SystemExit) as refused, keep_lease(Lease(redis, 30.0), SharedState(), RETRY_S):
            pass
    finally:
        ended.set()
        other.join()
    assert str(refused.value).startswith("another trainer holds weir:trainer_lease: far:7, since 20")
    assert "\n" not in str(refused.value)


def test_of_two_trainers_that_wait_for_a_lease_one_ends(redis: Redis) -> None:
    leave_a_lease(redis, 0.5)
    ends: list[object] = []
    refused = Event()

    def begin() -> None:
        with suppress(SystemExit):
            with (
                redis_at(redis_url) as own,
                keep_lease(Lease(own, 3.0), SharedState(), RETRY_S) as held,
            ):
                ends.append(held)
                assert refused.wait(300)
            return
        ends.append("refused")
        refused.set()

    arguments = redis.get_connection_kwargs()
    redis_url = f"redis://{arguments['host']}:{arguments['port']}/{arguments['db']}"
    both = [Thread(target=begin) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert sorted(map(str, ends)) == ["True", "refused"]


def test_a_trainer_that_waits_for_a_lease_can_be_stopped(redis: Redis) -> None:
    leave_a_lease(redis, 1000.0)
    shared_state = SharedState()
    waiting = Timer(0.2, shared_state.stop)
    waiting.start()
    with keep_lease(Lease(redis, 30.0), shared_state, RETRY_S) as held:
        assert not held
    waiting.join()
    assert redis.exists(keys.LEASE)


def test_a_trainer_waits_for_a_redis_that_is_away() -> None:
    shared_state = SharedState()
    waiting = Timer(0.2, shared_state.stop)
    waiting.start()
    with (
        Redis.from_url("redis://127.0.0.1:1/0") as nobody,
        keep_lease(Lease(nobody, 30.0), shared_state, RETRY_S) as held,
    ):
        assert not held
    waiting.join()


@pytest.mark.parametrize("moment", ["checkpoint", "its end", "publish"])
def test_a_trainer_that_lost_its_lease_neither_saves_nor_publishes(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another trainer claims the lease during the step."""
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    moments, confirm = iter(["checkpoint", "its end", "publish"]), harness.heartbeat.confirm

    def slept() -> None:
        harness.stream.taken_over = next(moments) == moment
        confirm()

    monkeypatch.setattr(harness.heartbeat, "confirm", slept)
    with pytest.raises(LeaseLost):
        harness.trainer.run()
    assert (harness.settings.checkpoint_dir / "CURRENT").exists() is (moment == "publish")
    assert not harness.gateway.announced
    durable = moment == "publish"
    assert set(harness.session_codes().values()) == {"trained" if durable else None}


def test_a_paused_trainer_notices_that_it_lost_its_lease(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.shared_state.pause()
    harness.stream.taken_over = True
    with pytest.raises(LeaseLost):
        harness.trainer.run()
