"""A writer's connection to Redis survives lost answers, silence, and callers who leave."""

import asyncio
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue.redis.connection.pipelined import WRITTEN_FOR, PipelinedConnection

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
    with pytest.raises(ResponseError):
        await own.command("NO-SUCH-COMMAND")


async def test_a_redis_that_is_silent_is_given_up(connect: Connect) -> None:
    own = connect(timeout_s=0.2)
    started = asyncio.get_running_loop().time()
    with pytest.raises(RedisTimeoutError):
        await own.command("BLPOP", "nothing-comes-here", 60)
    assert asyncio.get_running_loop().time() - started < 30
    assert await own.command("ECHO", "back") == b"back"


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
        assert all(isinstance(each, RedisTimeoutError) for each in heard), heard
        assert asyncio.get_running_loop().time() - started < 8 * timeout_s, "one after the other"
        await own.close()
    silent.set()
    server.close()


def test_the_pipelined_connection_was_written_for_this_redis_py() -> None:
    """It uses private attributes of redis-py. After an upgrade, follow the text at WRITTEN_FOR."""
    assert version("redis") == WRITTEN_FOR
