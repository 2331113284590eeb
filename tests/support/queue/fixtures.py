"""Fixtures: the two ends of a stream and of a command log, on an empty Redis."""

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.redis.command_log import CommandReader, CommandSubmissions
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.ends import Ends
from tests.support.redis_clients import async_redis_at, redis_at


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """Afterwards, its memory has no bound."""
    client = redis_at(redis_url)
    client.flushdb()
    yield client
    client.config_set("maxmemory", 0)
    client.close()


@pytest.fixture
async def connection(redis: Redis, redis_url: str) -> AsyncIterator[AsyncRedis]:
    async with async_redis_at(redis_url) as connection:
        yield connection


@pytest.fixture
def log(connection: AsyncRedis) -> CommandSubmissions:
    return CommandSubmissions(connection, lambda: 100_000)


@pytest.fixture
def reader(redis: Redis) -> CommandReader:
    lease = Lease(redis, 30)
    assert lease.claim() is None
    return CommandReader(redis, lease.token)


@pytest.fixture
async def writer(connection: AsyncRedis) -> AsyncIterator[StreamWriter]:
    writer = StreamWriter(connection)
    yield writer
    await writer.close()


@pytest.fixture
def stream(writer: StreamWriter, connection: AsyncRedis, redis: Redis) -> Ends:
    return Ends(writer, connection, redis)


@pytest.fixture
def ends(stream: Ends) -> Ends:
    return stream
