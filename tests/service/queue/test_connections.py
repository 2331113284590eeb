"""A writer's connection to Redis survives lost answers, silence, and callers who leave."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis.pipelined import WRITTEN_FOR, PipelinedConnection
from rollout_queue.redis.redis_client import open_async_redis
from rollout_queue.redis.settings import RedisSettings

Connect = Callable[..., PipelinedConnection]
"""Makes a connection to the test's Redis, or to the given one, with this timeout."""


@pytest.fixture
async def connect(connection: AsyncRedis) -> AsyncIterator[Connect]:
    made: list[PipelinedConnection] = []

    def make(redis: AsyncRedis = connection, **given: Any) -> PipelinedConnection:
        made.append(PipelinedConnection(redis, **given))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_an_answer_that_was_lost_with_its_connection_is_asked_for_again(
    connect: Connect, connection: AsyncRedis
) -> None:
    own = connect()
    answers = await asyncio.gather(*(own.command("ECHO", number) for number in range(300)))
    assert answers == [str(number).encode() for number in range(300)]
    await connection.client_kill_filter(_type="normal", skipme=True)
    assert await own.command("ECHO", "again") == b"again"
    with pytest.raises(StorageUnavailable, match="unknown command"):
        await own.command("NO-SUCH-COMMAND")


async def test_a_connection_that_redis_has_closed_is_lent_to_nobody(
    redis_url: str, connection: AsyncRedis
) -> None:
    """Each command opens the next connection, although it could not be repeated."""
    pool = open_async_redis(RedisSettings(redis_url=redis_url), timeout_s=10)
    await asyncio.gather(*(pool.blpop(["nothing"], 0.01) for _ in range(5)))
    kept = [each["id"] for each in await connection.client_list() if each["cmd"] == "blpop"]
    assert len(kept) == 5
    for client_id in kept:
        await connection.client_kill_filter(_id=client_id)
    for number in range(10):
        await connection.ping()  # its answer arrives after the ends of the others
        asking: Any = pool.pipeline(transaction=False)
        assert await asking.echo(str(number)).execute() == [str(number).encode()]
    await pool.aclose()


async def test_a_redis_that_is_silent_is_given_up(connect: Connect) -> None:
    own = connect(timeout_s=2.0)
    started = asyncio.get_running_loop().time()
    with pytest.raises(StorageUnavailable, match="did not answer in time"):
        await own.command("BLPOP", "nothing-comes-here", 60)
    assert asyncio.get_running_loop().time() - started < 30
    assert await own.command("ECHO", "back") == b"back"


@pytest.mark.parametrize("before_s", [0.0, 0.5, 1.5])
async def test_a_process_that_stood_still_hears_what_redis_answered_meanwhile(
    connect: Connect, redis_url: str, before_s: float
) -> None:
    """It stands still for longer than an answer may take, from whatever moment on, at both clients."""
    own = connect(timeout_s=2.0)
    pool = open_async_redis(RedisSettings(redis_url=redis_url), timeout_s=2.0)
    await asyncio.gather(own.command("PING"), *(pool.ping() for _ in range(5)))
    asked = [asyncio.ensure_future(own.command("ECHO", str(number))) for number in range(20)]
    asked += [asyncio.ensure_future(pool.echo(str(number))) for number in range(20, 25)]
    asked += [asyncio.ensure_future(own.command("BLPOP", "nothing", 1.0)) for _ in range(before_s > 0)]
    await asyncio.sleep(before_s)  # moves the standstill against the timers
    time.sleep(3.0)  # noqa: ASYNC251 - the whole loop stands still
    heard = await asyncio.gather(*asked)
    assert heard[:25] == [str(number).encode() for number in range(25)]
    await pool.aclose()


async def test_a_new_connection_does_not_wait_for_the_end_of_the_old_one(
    connect: Connect, redis_url: str
) -> None:
    """What the old one had still to send stays in its buffer, because nobody reads it."""
    address, lines = urlsplit(redis_url), list[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(writer)
        there_reader, there = await asyncio.open_connection(address.hostname, address.port)
        lines.append(there)
        answering = asyncio.create_task(copy(there_reader, writer))
        first = len(lines) == 2
        while data := await reader.read(2**16):
            there.write(data)
            if first and b"large" in data:
                await asyncio.Event().wait()
        await answering

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    own = connect(AsyncRedis(host=host, port=port), timeout_s=2.0)
    with pytest.raises(StorageUnavailable, match="did not answer in time"):
        await own.command("SET", "large", b"x" * 20_000_000)
    assert await own.command("ECHO", "back") == b"back"
    server.close()
    for line in lines:
        line.transport.abort()


async def test_one_caller_who_leaves_disturbs_no_other(connect: Connect, connection: AsyncRedis) -> None:
    """A caller is cancelled while its large command waits for a slow socket. Others get their own answers."""
    own = connect()
    await own.command("PING")
    for number in range(5):
        await connection.client_pause(100)
        leaving = asyncio.create_task(own.command("SET", "large", b"x" * 20_000_000))
        await asyncio.sleep(0.02)  # the command is larger than any buffer, so that it is half sent now
        leaving.cancel()
        asked = [f"{number}-{index}" for index in range(20)]
        heard = await asyncio.gather(*(own.command("ECHO", each) for each in asked))
        assert [each.decode() for each in heard] == asked
        await asyncio.gather(leaving, return_exceptions=True)
    await own.command("DEL", "large")


async def test_a_redis_that_takes_the_call_and_says_nothing_is_given_up_for_all(connect: Connect) -> None:
    silent, timeout_s = asyncio.Event(), 2.0

    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with AsyncRedis(host=host, port=port) as redis:
        own = connect(redis, timeout_s=timeout_s)
        started = asyncio.get_running_loop().time()
        heard = await asyncio.gather(*(own.command("PING") for _ in range(8)), return_exceptions=True)
        assert {str(each) for each in heard} == {"Redis: Redis did not answer in time"}
        assert asyncio.get_running_loop().time() - started < 8 * timeout_s, "one after the other"
        await own.close()
    silent.set()
    server.close()


def test_the_pipelined_connection_was_written_for_this_redis_py() -> None:
    """It uses private attributes of redis-py. After an upgrade, follow the text at WRITTEN_FOR."""
    assert version("redis") == WRITTEN_FOR
