"""What a gateway reads, and what it keeps in memory, of the sessions that agents call."""

import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Sampling, Span, Turn
from rollout_queue.redis.session_heads import PIECE_BYTES, HeadCache
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.records import reward, spec, turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_process import RedisProcess

CONTEXT, OUTPUT = 4000, 100
FIELD_BYTES = 64
"""More than the name of a turn's field takes in Redis' answer."""
REST_BYTES = 4096
"""The session's other fields, and Redis' answers to two INFO."""


def long_turn(number: int, session_id: str = "s1", **fields: Any) -> Turn:
    given = {
        "context_ids": TokenIds(range(CONTEXT)),
        "output_ids": TokenIds(range(OUTPUT)),
        "logprobs": Logprobs([-0.5] * OUTPUT),
        "versions": (Span(3, 0, OUTPUT),),
        "sampling": Sampling({"temperature": 0.7, "max_tokens": 100}, {"temperature": 1.0, "top_p": 1.0}),
        "finished_at": 101.0 + number,
        "parent_id": f"{session_id}-turn-{number - 1:024}" if number else None,
    }
    return turn(f"{session_id}-turn-{number:024}", session_id, **(given | fields))


class Writers:
    """Two gateways' writers, and how many bytes Redis sends."""

    def __init__(self, one: StreamWriter, other: StreamWriter, redis: Redis) -> None:
        self.one, self.other, self.redis = one, other, redis

    async def bytes_of(self, read: Callable[[], Awaitable[object]]) -> int:
        def sent() -> int:
            return int(self.redis.info("stats")["total_net_output_bytes"])

        before = sent()
        own = sent() - before  # the answer to INFO itself
        start = sent()
        await read()
        return sent() - start - own


@pytest.fixture
async def writers(tmp_path: Path) -> AsyncIterator[Writers]:
    process = RedisProcess(tmp_path / "redis").start()  # nobody else reads from it
    redis = async_redis_at(process.url)
    one, other = (StreamWriter(redis) for _ in range(2))
    yield Writers(one, other, process.client)
    await one.close()
    await other.close()
    await redis.aclose()
    process.close()


async def test_a_call_of_a_long_session_reads_only_the_turns_that_other_gateways_added(
    writers: Writers,
) -> None:
    turns = 50
    await writers.one.open_session(spec())
    for number in range(turns):
        await writers.one.append_turn(long_turn(number), 1e9)
    whole = await writers.bytes_of(lambda: writers.other.load_for_call("s1"))
    assert whole > turns * 4 * CONTEXT, "the first time, a gateway reads the whole session"
    await writers.one.append_turn(long_turn(turns), 1e9)
    await writers.one.append_reward(reward())
    bound = (turns + 3) * FIELD_BYTES + len(encode(long_turn(turns))) + REST_BYTES
    assert bound < whole / 20
    assert await writers.bytes_of(lambda: writers.other.load_for_call("s1")) <= bound
    assert await writers.other.load_for_call("s1") == await writers.one.load("s1")


async def test_a_gateway_reads_the_others_turn_even_after_it_added_one(writers: Writers) -> None:
    """Both gateways append to a session in turns, and each reads only what the other one added."""
    await writers.one.open_session(spec())
    both = (writers.one, writers.other)
    for number in range(20):
        await both[number % 2].append_turn(long_turn(number), 1e9)
    for number in range(20, 30):
        writer = both[number % 2]
        read = await writers.bytes_of(partial(writer.load_for_call, "s1"))
        if number > 21:  # each knows the session now
            assert read <= (number + 2) * FIELD_BYTES + 2 * len(encode(long_turn(0))) + REST_BYTES
        await writer.append_turn(long_turn(number), 1e9)
    for writer in both:
        assert await writer.load_for_call("s1") == await writer.load("s1")


async def test_a_retry_in_a_long_session_reads_only_what_is_missing(writers: Writers) -> None:
    await writers.one.open_session(spec())
    for number in range(40):
        await writers.one.append_turn(long_turn(number, request_digest=f"r{number}"), 1e9)
    assert await writers.one.load_for_call("s1") is not None
    again = long_turn(40, request_digest="r39", attempt=1, started_at=200.0, parent_id=None)
    read = await writers.bytes_of(lambda: writers.one.append_turn(again, 1e9))
    assert read <= 40 * FIELD_BYTES + REST_BYTES
    head = await writers.one.load("s1")
    assert head is not None
    assert head.orphans == {long_turn(39).turn_id: again.turn_id}


async def test_a_large_session_is_read_in_pieces_that_keep_nobody_waiting(writers: Writers) -> None:
    """40 branches of 35,000 tokens, and 600 small turns, of which a gateway knows nothing yet."""
    await writers.one.open_session(spec())
    branch: dict[str, Any] = {"context_ids": TokenIds(range(35_000)), "parent_id": None}
    for number in range(40):
        await writers.one.append_turn(long_turn(number, **branch), 1e9)
    for number in range(40, 640):
        await writers.one.append_turn(turn(f"t{number}", finished_at=101.0 + number), 1e9)
    await writers.one.append_reward(reward())
    writers.redis.config_resetstat()
    assert await writers.other.load_for_call("s1") == await writers.one.load("s1")
    calls = {name: int(each["calls"]) for name, each in writers.redis.info("commandstats").items()}
    assert calls["cmdstat_hmget"] > 40 * 4 * 35_000 // PIECE_BYTES // 2


async def test_another_session_under_the_same_id_is_read_whole(writers: Writers) -> None:
    await writers.one.open_session(spec())
    await writers.one.append_turn(long_turn(0), 1e9)
    assert await writers.one.load_for_call("s1") is not None
    writers.redis.delete("weir:s:s1")
    await writers.other.open_session(spec(task_id="another"))
    for number in range(1, 4):
        await writers.other.append_turn(long_turn(number, parent_id=None), 1e9)
    assert await writers.one.load_for_call("s1") == await writers.other.load("s1")


def heads(count: int, turns: int) -> dict[str, list[bytes]]:
    """The bytes of sessions, as Redis has them."""
    names = [f"session-{number:032}" for number in range(count)]
    return {name: [encode(long_turn(number, name)) for number in range(turns)] for name in names}


@pytest.mark.parametrize(("count", "turns"), [(12, 20), (400, 1)])
def test_the_cache_takes_no_more_memory_than_its_limit(count: int, turns: int) -> None:
    stored, limit = heads(count, turns), 2 * 2**20
    tracemalloc.start()
    cache, before = HeadCache(limit), tracemalloc.get_traced_memory()[0]
    for name, packed in stored.items():
        found = tuple(each for each in map(decode, packed) if isinstance(each, Turn))
        cache.put(1 + turns, SessionHead(spec=spec(name), turns=found))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0 < len(cache) < count, "some were dropped"
    assert limit / 2 < taken <= limit
