"""Fixtures: the two ends of a command log on an empty Redis."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.redis.commands.reader import RedisCommandReader
from rollout_queue.redis.commands.submission import CommandSubmissions
from rollout_queue.redis.lease import Lease


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = Redis.from_url(redis_url)
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
async def log(redis: Redis, redis_url: str) -> AsyncIterator[CommandSubmissions]:
    client = AsyncRedis.from_url(redis_url)
    yield CommandSubmissions(client, lambda: 100_000)
    await client.aclose()


@pytest.fixture
def reader(redis: Redis) -> RedisCommandReader:
    lease = Lease(redis, 30)
    assert lease.claim() is None
    return RedisCommandReader(redis, lease.token)
