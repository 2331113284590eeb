"""Fixtures: the two ends of a stream and of a command log, on an empty Redis."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from rollout_queue.memory import MemoryStream
from rollout_queue.redis.commands.reader import RedisCommandReader
from rollout_queue.redis.commands.submission import CommandSubmissions
from rollout_queue.redis.connection.kinds import CONNECTIONS
from rollout_queue.redis.lease.lease import Lease
from rollout_queue.redis.writer import RedisWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.ends import Ends
from tests.support.redis_clients import async_redis_at, redis_at


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = redis_at(redis_url)
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
async def log(redis: Redis, redis_url: str) -> AsyncIterator[CommandSubmissions]:
    client = async_redis_at(redis_url)
    yield CommandSubmissions(client, lambda: 100_000)
    await client.aclose()


@pytest.fixture
def reader(redis: Redis) -> RedisCommandReader:
    lease = Lease(redis, 30)
    assert lease.claim() is None
    return RedisCommandReader(redis, lease.token)


@pytest.fixture(params=["memory", *CONNECTIONS])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    if request.param == "memory":
        memory = MemoryStream()
        yield Ends(memory, memory)
        return
    url = request.getfixturevalue("redis_url")
    redis, sync = async_redis_at(url), redis_at(url)
    sync.flushdb()
    writer = RedisWriter(redis, CONNECTIONS[request.param])
    yield Ends(writer, claimed_reader(sync), sync)
    await writer.close()
    sync.close()
    await redis.aclose()
