"""The stream's two ends behave alike in memory and on a real Redis: the same tests hold both."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue import keys
from rollout_queue.codec import encode
from rollout_queue.errors import Conflict, SessionClosed, StorageUnavailable
from rollout_queue.head import SessionHead
from rollout_queue.memory import MemoryStream
from rollout_queue.records import Outcome, Reward, SessionSpec, Span, Turn, Verdict
from rollout_queue.redis_reader import RedisReader
from rollout_queue.redis_writer import RedisWriter
from rollout_queue.stream import StreamReader, StreamWriter, Verdicts
from rollout_queue.tokens import Logprobs, TokenIds

NOTHING = Verdicts(sessions={}, turns={})


def spec(session_id: str = "s1", **fields: Any) -> SessionSpec:
    return SessionSpec(session_id=session_id, created_at=100.0, **fields)


def turn(turn_id: str = "t1", session_id: str = "s1", **fields: Any) -> Turn:
    given: dict[str, Any] = {
        "context_ids": TokenIds([1, 2, 3]),
        "output_ids": TokenIds([4, 5]),
        "logprobs": Logprobs([-0.5, -0.25]),
        "versions": (Span(0, 0, 2),),
        "finish": "stop",
        "started_at": 100.0,
        "finished_at": 101.0,
    }
    return Turn(turn_id=turn_id, session_id=session_id, **(given | fields))


def outcome(session_id: str = "s1", **fields: Any) -> Outcome:
    return Outcome(session_id=session_id, created_at=102.0, **({"status": "completed"} | fields))


def reward(key: str = "k", session_id: str = "s1", **fields: Any) -> Reward:
    return Reward(session_id=session_id, key=key, created_at=102.0, **({"value": 1.0} | fields))


class Ends:
    """Both ends of one stream."""

    def __init__(self, writer: StreamWriter, reader: StreamReader) -> None:
        self.writer, self.reader = writer, reader

    def read(self) -> list[Any]:
        return [entry.record for entry in self.reader.read(100, 0.01)]


@pytest.fixture(params=["memory", "redis"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    if request.param == "memory":
        memory = MemoryStream()
        yield Ends(memory, memory)
        return
    url = request.getfixturevalue("redis_url")
    redis, sync = AsyncRedis.from_url(url), Redis.from_url(url)
    sync.flushdb()
    yield Ends(RedisWriter(redis), RedisReader(sync))
    sync.close()
    await redis.aclose()


async def test_a_turn_reaches_the_trainer_as_it_was_appended(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), expires_at=200.0)
    assert ends.read() == [turn()]


async def test_the_head_holds_what_the_stream_holds(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_reward(reward())
    await ends.writer.append_outcome(outcome(), None, None)
    head = await ends.writer.load("s1")
    assert head is not None
    assert (head.turns, head.rewards, head.outcome) == ((turn(),), (reward(),), outcome())
    assert ends.read() == [turn(), reward(), outcome()]


async def test_an_unknown_session_has_no_head(ends: Ends) -> None:
    assert await ends.writer.load("nobody") is None


async def test_sessions_are_listed_by_age_page_by_page(ends: Ends) -> None:
    for name, created_at in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=created_at))
    pages = [await ends.writer.sessions(start, 2) for start in (0, 2, 4)]
    assert [[head.spec.session_id for head in page] for page in pages] == [["a", "b"], ["c"], []]


async def test_a_session_is_opened_once(ends: Ends) -> None:
    first, created = await ends.writer.open_session(spec(task_id="a"))
    again, created_again = await ends.writer.open_session(spec(task_id="b"))
    assert (created, created_again) == (True, False)
    assert again == first


async def test_a_group_admits_its_size_and_no_more(ends: Ends) -> None:
    for name in ("a", "b"):
        await ends.writer.open_session(spec(name, group_id="g", group_size=2))
    with pytest.raises(Conflict, match="2 sessions"):
        await ends.writer.open_session(spec("c", group_id="g", group_size=2))


async def test_a_group_has_one_size_and_one_owner(ends: Ends) -> None:
    await ends.writer.open_session(spec("a", group_id="g", group_size=3))
    with pytest.raises(Conflict, match="size"):
        await ends.writer.open_session(spec("b", group_id="g", group_size=2))
    with pytest.raises(Conflict, match="another client"):
        await ends.writer.open_session(spec("c", group_id="g", group_size=3, owner="x"))


async def test_a_group_takes_its_size_from_the_first_session_that_says_one(ends: Ends) -> None:
    await ends.writer.open_session(spec("a", group_id="g"))
    await ends.writer.open_session(spec("b", group_id="g", group_size=3))
    with pytest.raises(Conflict, match="size 3"):
        await ends.writer.open_session(spec("c", group_id="g", group_size=2))
    assert await ends.writer.group_progress("g") == (0, 3)


async def test_a_group_is_created_once(ends: Ends) -> None:
    members = [spec(name, group_id="g", group_size=2) for name in ("a", "b")]
    await ends.writer.open_group(members)
    with pytest.raises(Conflict, match="exists"):
        await ends.writer.open_group(members)
    assert await ends.writer.group_progress("g") == (0, 2)
    await ends.writer.append_outcome(outcome("a"), None, None)
    assert await ends.writer.group_progress("g") == (1, 2)


async def test_nothing_is_added_to_a_closed_session(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(), None, None)
    with pytest.raises(SessionClosed):
        await ends.writer.append_turn(turn(), 200.0)
    assert ends.read() == [outcome()]


async def test_a_turn_needs_a_session(ends: Ends) -> None:
    with pytest.raises(SessionClosed):
        await ends.writer.append_turn(turn(), 200.0)
    assert ends.read() == []


async def test_a_reward_key_counts_once(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_reward(reward(value=1.0))
    stored = await ends.writer.append_reward(reward(value=0.5))
    assert stored.value == 1.0
    assert ends.read() == [reward(value=1.0)]


async def test_a_reward_after_the_verdict_is_kept_as_late_and_not_sent(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    failed = Verdict(code="failed")
    await ends.writer.append_outcome(outcome(status="failed"), None, failed)
    stored = await ends.writer.append_reward(reward())
    head = await ends.writer.load("s1")
    assert head is not None
    assert stored.late
    assert head.rewards == (stored,)
    assert ends.read() == [outcome(status="failed")]


async def test_a_turn_that_is_appended_again_is_there_once(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_outcome(outcome(), None, None)
    await ends.writer.append_turn(turn(), 200.0)
    assert ends.read() == [turn(), outcome()]


async def test_a_turn_is_found_by_the_conversation_that_it_answers(ends: Ends) -> None:
    await ends.writer.open_session(spec(ttl_s=1e300))
    await ends.writer.append_turn(turn(reply_digest="d"), 1e300, "me")
    assert await ends.writer.find_continuation("me", ["other", "d"]) == "s1"
    assert await ends.writer.find_continuation("you", ["d"]) is None


async def test_a_final_reward_does_not_replace_one_of_its_key(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_reward(reward("finish", value=1.0))
    await ends.writer.append_outcome(outcome(), reward("finish", value=0.5), None)
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.rewards == (reward("finish", value=1.0),)
    assert ends.read() == [reward("finish", value=1.0), outcome()]


async def test_the_first_outcome_stands(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(), reward("finish"), None)
    stored = await ends.writer.append_outcome(outcome(status="failed"), None, None)
    assert stored == outcome()
    assert ends.read() == [reward("finish"), outcome()]


async def test_entries_stay_owed_until_they_are_acknowledged(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn("t1"), 200.0)
    await ends.writer.append_turn(turn("t2"), 200.0)
    first, second = ends.reader.read(10, 0.01)
    ends.reader.acknowledge([first.entry_id], NOTHING)
    assert list(ends.reader.reclaim()) == [second]
    assert ends.read() == []


async def test_verdicts_reach_the_head(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    (entry,) = ends.reader.read(10, 0.01)
    trained = Verdict(code="trained", step=3, version=4)
    ends.reader.acknowledge([entry.entry_id], Verdicts({"s1": trained}, {("s1", "t1"): trained}))
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.verdict == trained
    assert head.turn_verdicts == {"t1": trained}


async def test_a_session_past_its_deadline_expires_with_a_verdict(ends: Ends) -> None:
    await ends.writer.open_session(spec(ttl_s=10.0))
    await ends.writer.open_session(spec("s2", ttl_s=1000.0))
    assert await ends.writer.expire(now=111.0, limit=10) == 1
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.verdict is not None
    assert head.verdict.code == "expired"
    assert [record.session_id for record in ends.read()] == ["s1"]
    assert await ends.writer.expire(now=111.0, limit=10) == 0


async def test_a_call_moves_the_deadline(ends: Ends) -> None:
    await ends.writer.open_session(spec(ttl_s=10.0))
    await ends.writer.append_turn(turn(), expires_at=500.0)
    assert await ends.writer.expire(now=111.0, limit=10) == 0


async def test_a_session_that_waits_for_the_trainer_alone_does_not_expire(ends: Ends) -> None:
    await ends.writer.open_session(spec("rewarded", ttl_s=10.0))
    await ends.writer.append_outcome(outcome("rewarded"), reward("finish", "rewarded"), None)
    await ends.writer.open_session(spec("unrewarded", ttl_s=10.0))
    await ends.writer.append_outcome(outcome("unrewarded"), None, None)
    assert await ends.writer.expire(now=111.0, limit=10) == 1
    rewarded, unrewarded = await ends.writer.load("rewarded"), await ends.writer.load("unrewarded")
    assert rewarded is not None
    assert unrewarded is not None
    assert rewarded.verdict is None
    assert unrewarded.verdict is not None


# What only a real Redis can show


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = Redis.from_url(redis_url)
    client.flushdb()
    yield client
    client.close()


def test_acknowledged_entries_leave_the_stream_and_owed_ones_never(redis: Redis) -> None:
    reader = RedisReader(redis)
    for index in range(5):
        redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn(f"t{index}"))})
    entries = reader.read(3, 0.01)
    reader.acknowledge([entries[0].entry_id, entries[2].entry_id], NOTHING)
    raw: Any = redis.xrange(keys.STREAM)
    left = [entry_id.decode() for entry_id, _ in raw]
    assert left[:2] == [entries[1].entry_id, entries[2].entry_id]
    assert len(left) == 4


def test_a_record_nobody_can_read_is_set_aside_with_its_bytes(redis: Redis) -> None:
    reader = RedisReader(redis)
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: b"\x09nonsense"})
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn())})
    assert [entry.record for entry in reader.read(10, 0.01)] == [turn()]
    letters: Any = redis.xrange(keys.DEAD_LETTERS)
    ((_, letter),) = letters
    assert letter[keys.STREAM_FIELD] == b"\x09nonsense"
    assert b"schema 9" in letter[b"error"]
    assert len(list(reader.reclaim())) == 1


def test_a_second_reader_takes_up_what_the_first_left(redis: Redis) -> None:
    first = RedisReader(redis)
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn())})
    first.read(10, 0.01)
    assert [entry.record for entry in RedisReader(redis).reclaim()] == [turn()]


async def test_a_redis_that_is_gone_is_storage_unavailable(tmp_path: Path) -> None:
    nowhere = AsyncRedis.from_url(f"unix://{tmp_path}/nobody")
    with pytest.raises(StorageUnavailable):
        await RedisWriter(nowhere).append_turn(turn(), 200.0)
    with pytest.raises(StorageUnavailable):
        await RedisWriter(nowhere).open_session(spec())


async def test_a_call_in_time_wins_over_a_gateway_that_saw_the_old_deadline(
    redis: Redis, redis_url: str
) -> None:
    connection = AsyncRedis.from_url(redis_url)
    writer = RedisWriter(connection)
    await writer.open_session(spec(ttl_s=10.0))
    await writer.append_turn(turn(), expires_at=500.0)
    assert await writer._expire_one("s1", now=111.0) == 0
    await connection.aclose()


async def test_a_full_redis_takes_a_record_whole_or_not_at_all(redis: Redis, redis_url: str) -> None:
    connection = AsyncRedis.from_url(redis_url)
    writer = RedisWriter(connection)
    await writer.open_session(spec())
    redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(StorageUnavailable):
            await writer.append_turn(turn(), 200.0)
        with pytest.raises(StorageUnavailable):
            await writer.open_group([spec("a", group_id="g"), spec("b", group_id="g")])
    finally:
        redis.config_set("maxmemory", 0)
    assert await writer.load("s1") == SessionHead(spec=spec())
    assert redis.xlen(keys.STREAM) == 0
    assert redis.exists(keys.group("g")) == 0
    await connection.aclose()


def test_replacing_a_field_keeps_a_record_valid() -> None:
    assert msgspec.structs.replace(turn(), train=False).train is False
