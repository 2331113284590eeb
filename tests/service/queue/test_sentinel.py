"""Redis behind three real sentinels: what is answered and survives when the master is killed, or demoted."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import PATIENCES_S, open_async_redis, open_redis
from rollout_queue.redis.settings import RedisSettings, Replication
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.dead_nodes import down, pinged
from tests.support.queue.load import Load
from tests.support.queue.records import outcome, spec, turn
from tests.support.queue.servers import WatchedMaster
from tests.support.waiting import PATIENCE_S, wait_until
from weir.audit.audit_facts import ClientAnswer

pytestmark = pytest.mark.failover

ALL_REPLICAS = Replication(2, 3.0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedMaster]:
    found = WatchedMaster(tmp_path_factory.mktemp("sentinel") / "servers")
    yield found
    found.close()


@pytest.fixture
def watched(servers: WatchedMaster) -> WatchedMaster:
    """All servers are well and empty, and the replicas keep up."""
    wait_until(lambda: servers.complete(2))
    servers.master.client.flushall()
    servers.master.client.hset(key_names.POLICIES, "0", "{}")
    wait_until(lambda: servers.master.client.wait(2, 100) == 2)
    return servers


def kill_the_master(watched: WatchedMaster, *, by_itself: bool = False) -> None:
    master = watched.master
    master.kill()
    watched.fail_over(master, by_itself=by_itself)


def test_a_killed_master_loses_nothing_that_its_replicas_have_confirmed(
    watched: WatchedMaster, tmp_path: Path
) -> None:
    """Agents and a trainer work meanwhile."""
    load = Load(RedisSettings(redis_url=watched.url), ALL_REPLICAS)
    asyncio.run(load.during(lambda: kill_the_master(watched)))
    load.check(tmp_path / "none")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_killed_masters_lose_nothing_that_their_replicas_have_confirmed(
    watched: WatchedMaster, tmp_path: Path
) -> None:
    load = Load(RedisSettings(redis_url=watched.url), ALL_REPLICAS)

    def fault() -> None:
        for _ in range(20):
            kill_the_master(watched, by_itself=True)

    asyncio.run(load.during(fault))
    load.check(tmp_path / "none")
    print(f"{len(load.answers)} answers survived 20 failovers; {load.refused} calls got an error")


def test_the_audit_names_what_a_killed_master_had_not_sent_to_its_replicas(
    watched: WatchedMaster, tmp_path: Path
) -> None:
    """The replicas are suspended and cut off while the master answers; then it is killed for good."""
    load = Load(RedisSettings(redis_url=watched.url))
    told: list[ClientAnswer] = []

    async def gateway() -> None:
        redis = open_async_redis(load.settings, timeout_s=5)
        writer = StreamWriter(redis)
        for number in range(2):
            if number == 1:
                for replica in replicas:
                    replica.suspend()
                master.client.client_kill_filter(_type="replica")
            await writer.open_session(spec(f"s{number}"))
            await writer.append_turn(turn(f"s{number}-t", f"s{number}"), expires_at=1e12)
            await writer.append_outcome(outcome(f"s{number}"), None, None)
            told.append(ClientAnswer(f"s{number}", turn_id=f"s{number}-t", finished=True))
            if number == 0:
                wait_until(lambda: watched.complete(2))
        await writer.close()
        await redis.aclose()

    master, replicas = watched.master, watched.replicas
    asyncio.run(gateway())
    master.kill()
    for replica in replicas:
        replica.resume()
    watched.fail_over(master)
    load.answers += told
    assert load.lost() == told[1:]
    report = load.audited(tmp_path / "none")
    assert {finding.rule for finding in report.findings} == {"answered"}
    assert {finding.subject for finding in report.findings} == {
        "session s1", "session s1 t:s1-t", "session s1 outcome",
    }  # fmt: skip


def test_a_turn_that_replicas_do_not_confirm_is_refused_and_retracted(watched: WatchedMaster) -> None:
    async def gateway() -> None:
        redis = open_async_redis(RedisSettings(redis_url=watched.url), timeout_s=5)
        patient = StreamWriter(redis, replication=Replication(2, PATIENCE_S))
        writer = StreamWriter(redis, append_within_s=1.0, replication=Replication(2, 0.5))
        await patient.open_session(spec("s"))
        await patient.append_turn(turn("confirmed", "s"), expires_at=1e12)
        for replica in watched.replicas:
            replica.suspend()
        with pytest.raises(StorageUnavailable, match="0 of 2 replicas"):
            await writer.append_turn(turn("alone", "s"), expires_at=1e12)
        for replica in watched.replicas:
            replica.resume()
        wait_until(lambda: watched.complete(2))
        head = None
        while head is None or "alone-retracted" not in head.by_id:
            await writer.retract_failed()
            await asyncio.sleep(0.05)  # until the turn's deadline by Redis' clock
            head = await writer.load("s")
        assert "alone" in head.by_id
        await patient.append_turn(turn("after", "s"), expires_at=1e12)
        await patient.close()
        await writer.close()
        await redis.aclose()

    asyncio.run(gateway())


def test_sentinels_that_are_down_are_asked_once_and_briefly(watched: WatchedMaster) -> None:
    with down() as dead:
        host, others = watched.url.partition("://")[::2]
        settings = RedisSettings(redis_url=f"{host}://{dead.addresses},{others}")
        with closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis:
            assert redis.ping()
        wait_until(lambda: dead.asked == [1, 1])
        assert asyncio.run(pinged(settings))
        wait_until(lambda: dead.asked == [2, 2])
    assert max(PATIENCES_S[:1]) <= 0.3


def test_a_demoted_master_is_not_written_to(watched: WatchedMaster) -> None:
    """The connection stays open while its server becomes a replica, so the server refuses what comes next."""

    async def gateway() -> None:
        redis = open_async_redis(RedisSettings(redis_url=watched.url), timeout_s=5)
        writer = StreamWriter(redis)
        await writer.open_session(spec("before"))
        former = watched.master
        watched.sentinels[0].promote_another()
        watched.until_another(former)
        former.client.replicaof("127.0.0.1", str(watched.master.port))  # Sentinel does this after 8 s
        await writer.open_session(spec("after"))
        await writer.append_turn(turn("t", "after"), expires_at=1e12)
        assert watched.master.client.hexists(key_names.session("after"), "t:t")
        await writer.close()
        await redis.aclose()

    asyncio.run(gateway())
