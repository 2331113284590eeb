"""Redis as a real cluster of six nodes: one deployment's keys are in one slot, whose master may be killed."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis.crc import key_slot

from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings, Replication
from tests.support.queue.cluster import Cluster
from tests.support.queue.dead_nodes import down, pinged
from tests.support.queue.load import Load
from tests.support.waiting import PATIENCE_S, wait_until

ITS_REPLICA = Replication(1, 3.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster") / "nodes")
    yield found
    found.close()


def test_a_killed_master_loses_nothing_that_its_replica_has_confirmed(
    cluster: Cluster, tmp_path: Path
) -> None:
    load = Load(settings_of(cluster), ITS_REPLICA)
    asyncio.run(load.during(cluster.kill_owner))
    load.check(tmp_path / "none")
    assert {key_slot(key) for key in cluster.owner.client.scan_iter()} == {key_slot(b"{weir}")}


def settings_of(cluster: Cluster) -> RedisSettings:
    """Empties the deployment."""
    settings = RedisSettings(redis_url=cluster.url)
    with closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis:
        redis.flushdb()
        redis.hset(key_names.POLICIES, "0", "{}")
    return settings


def test_nodes_that_are_down_are_asked_once_and_briefly(cluster: Cluster) -> None:
    with down() as dead:
        host, others = cluster.url.partition("://")[::2]
        settings = RedisSettings(redis_url=f"{host}://{dead.addresses},{others}")
        with closing(open_redis(settings, timeout_s=PATIENCE_S)) as redis:
            assert redis.ping()
        assert asyncio.run(pinged(settings))
        wait_until(lambda: dead.asked == [2, 2])


def test_a_slot_that_moves_is_followed(cluster: Cluster, tmp_path: Path) -> None:
    """An operator has the replica take over while agents work: the former master answers with MOVED."""
    load = Load(settings_of(cluster))

    def take_over() -> None:
        former = cluster.owner
        cluster.take_over()
        assert cluster.owner is not former

    asyncio.run(load.during(take_over))
    load.check(tmp_path / "none")
