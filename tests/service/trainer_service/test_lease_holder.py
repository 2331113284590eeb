"""How a process claims the trainer's lease, and what it does when it has lost the lease."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from threading import Event, Thread, Timer

import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.redis import keys
from rollout_queue.redis.lease.holder import Holder
from rollout_queue.redis.lease.lease import Lease
from tests.support.redis_clients import redis_at
from tests.support.trainer_service.harness import MakeHarness
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from trainer_service.status.lease_holder import keep_lease
from trainer_service.status.shared_state import SharedState

RETRY_S = 0.01


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with redis_at(redis_url) as client:
        client.flushdb()
        yield client


def leave_a_lease(redis: Redis, lease_s: float) -> None:
    """Claim a lease and never renew it, like a trainer that crashed on another machine."""
    holder = msgspec.structs.replace(Holder.here(), host="far", pid=7, place="another boot")
    redis.set(keys.LEASE, msgspec.json.encode(holder), px=int(lease_s * 1000))


def test_a_lease_is_renewed_as_long_as_it_is_held_and_then_released(
    turned: TurnedClock, redis: Redis
) -> None:
    def is_renewed() -> bool:
        turned.turn(200)
        return redis.pttl(keys.LEASE) > 500_000

    with keep_lease(Lease(redis, 600.0), SharedState(), RETRY_S) as held:
        assert held
        for _ in range(4):
            redis.pexpire(keys.LEASE, 300_000)  # as if half of its time had passed
            wait_until(is_renewed)
    assert not redis.exists(keys.LEASE)


def test_a_trainer_waits_until_the_lease_of_a_crashed_one_expires(
    turned: TurnedClock, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)

    def expire() -> None:
        wait_until(lambda: f"{keys.LEASE} belongs to far:7, since 20" in caplog.text)
        redis.delete(keys.LEASE)
        turned.turn(1000)

    with ThreadPoolExecutor(1) as threads:
        expiry = threads.submit(expire)
        with keep_lease(Lease(redis, 30.0), SharedState(), RETRY_S) as held:
            assert held
        expiry.result()
    assert re.search(r"unless renewed, it expires in (1000\.0|9\d\d\.\d) s", caplog.text)


def test_a_trainer_ends_if_another_one_renews_the_lease(
    turned: TurnedClock, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)

    def renew() -> None:
        wait_until(lambda: keys.LEASE in caplog.text)
        redis.pexpire(keys.LEASE, 1_000_000)
        turned.turn(300)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(renew)
        with pytest.raises(SystemExit) as refused, keep_lease(Lease(redis, 30.0), SharedState(), RETRY_S):
            pass
        other.result()
    assert str(refused.value).startswith("another trainer holds weir:trainer_lease: far:7, since 20")
    assert "\n" not in str(refused.value)


def test_of_two_trainers_that_wait_for_a_lease_one_ends(
    turned: TurnedClock, redis: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)
    ends: list[object] = []
    refused = Event()

    def begin() -> None:
        with suppress(SystemExit):
            with (
                redis_at(redis_url) as own,
                keep_lease(Lease(own, 300.0), SharedState(), RETRY_S) as held,
            ):
                ends.append(held)
                assert refused.wait(300)
            return
        ends.append("refused")
        refused.set()

    def one_is_refused() -> bool:
        turned.turn(100)
        return refused.is_set()

    both = [Thread(target=copy_context().run, args=(begin,)) for _ in range(2)]
    for each in both:
        each.start()
    wait_until(lambda: caplog.text.count("unless renewed") == 2)
    redis.delete(keys.LEASE)
    wait_until(one_is_refused)
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
