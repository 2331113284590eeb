"""The stream's two ends behave alike in memory and on a real Redis: the same tests run on both."""

import asyncio
from collections.abc import Iterator
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue.contract.attempts import orphans_of
from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import Conflict, RewardsTooLarge, SessionClosed, StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.listing import LIST_START, ListedSession, ListPosition
from rollout_queue.contract.progress import GroupProgress
from rollout_queue.contract.records import SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.contract.tokens import TokenIds
from rollout_queue.contract.tombstone import Tombstone
from rollout_queue.memory import MemoryStream
from rollout_queue.redis import keys
from rollout_queue.redis.connection.pipelined import WRITTEN_FOR, PipelinedConnection
from rollout_queue.redis.connection.pooled import PooledConnection
from rollout_queue.redis.heads.cache import HeadCache
from rollout_queue.redis.scripts import sessions as session_scripts
from rollout_queue.redis.writer import RedisWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.ends import Ends
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.redis_faults import before_script

NOTHING = Verdicts(sessions={}, turns={})


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


def named(listed: ListedSession) -> str:
    found = listed.found
    assert found is not None
    assert listed.position.session_id == (found if isinstance(found, Tombstone) else found.spec).session_id
    return listed.position.session_id


async def test_sessions_are_listed_by_age_page_by_page(ends: Ends) -> None:
    for name, created_at in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=created_at))
    pages = [await ends.writer.sessions(LIST_START, 2)]
    while pages[-1]:
        pages.append(await ends.writer.sessions(pages[-1][-1].position, 2))
    assert [[named(each) for each in page] for page in pages] == [["a", "b"], ["c"], []]


async def test_the_place_of_a_session_is_between_those_of_its_age(ends: Ends) -> None:
    """The bytes of the ids decide among sessions of one age, not the locale. A position without a session is
    valid, too."""
    names = ["B", "a", "a-", "a0", "b", "ab"]
    for name in names:
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=1.0))
    await ends.writer.open_session(SessionSpec(session_id="A", created_at=2.0))
    for behind, next_ones in (("a", ["a-", "a0"]), ("a/", ["a0", "ab"]), ("", ["B", "a"]), ("b", ["A"])):
        assert [named(each) for each in await ends.writer.sessions(ListPosition(1.0, behind), 2)] == next_ones


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
    assert await ends.writer.group_progress("g") == GroupProgress(3, ended=0, open=2)


async def test_a_group_is_created_once(ends: Ends) -> None:
    members = [spec(name, group_id="g", group_size=2) for name in ("a", "b")]
    await ends.writer.open_group(members)
    with pytest.raises(Conflict, match="exists"):
        await ends.writer.open_group(members)
    assert await ends.writer.group_progress("g") == GroupProgress(2, ended=0, open=2)
    await ends.writer.append_outcome(outcome("a"), None, None)
    assert await ends.writer.group_progress("g") == GroupProgress(2, ended=0, open=1, unrewarded=1)


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
    assert await ends.writer.find_continuations("me", ["other", "d"]) == [None, "s1"]
    assert await ends.writer.find_continuations("you", ["d"]) == [None]


def attempt(turn_id: str, attempt: int, started_at: float, **fields: Any) -> Turn:
    """A turn for one attempt; all attempts have the same request."""
    return turn(turn_id, attempt=attempt, started_at=started_at, request_digest="q", **fields)


async def orphans(ends: Ends, *turns: Turn) -> dict[str, str]:
    """The orphans of a session with these turns in this order. Checks that stream and head agree."""
    await ends.writer.open_session(spec())
    appended = [await ends.writer.append_turn(each, 200.0) for each in turns]
    head = await ends.writer.load("s1")
    assert head is not None
    assert ends.read() == appended
    assert orphans_of(appended) == head.orphans
    return dict(head.orphans)


async def test_a_retry_replaces_the_turn_of_the_same_request(ends: Ends) -> None:
    other = turn("other", request_digest="other")
    turns = (other, attempt("first", 0, 100.0), attempt("again", 1, 110.0))
    assert await orphans(ends, *turns) == {"first": "again"}
    head = await ends.writer.load("s1")
    assert head is not None
    assert {each.turn_id: head.relation_of(each) for each in head.turns}["again"] == "retry"
    assert head.by_id["again"].retry_of == "first"


async def test_a_turn_that_is_recorded_after_its_retry_is_the_orphan_all_the_same(ends: Ends) -> None:
    turns = (attempt("again", 1, 110.0), attempt("first", 0, 100.0))
    assert await orphans(ends, *turns) == {"first": "again"}
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.relation_of(head.by_id["again"]) == "retry"


@pytest.mark.parametrize("order", list(permutations(("first", "second", "third"))))
async def test_of_three_attempts_the_last_one_stays_whichever_is_recorded_first(
    ends: Ends, order: tuple[str, ...]
) -> None:
    attempts = {
        "first": attempt("first", 0, 100.0),
        "second": attempt("second", 1, 110.0),
        "third": attempt("third", 2, 120.0),
    }
    assert set(await orphans(ends, *(attempts[name] for name in order))) == {"first", "second"}


async def test_identical_calls_that_nobody_marked_are_samples_of_their_own(ends: Ends) -> None:
    samples = [attempt(f"t{index}", 0, 100.0 + index) for index in range(3)]
    assert await orphans(ends, *samples) == {}


async def test_each_retry_replaces_one_sample(ends: Ends) -> None:
    samples = [attempt(f"t{index}", 0, 100.0 + index) for index in range(3)]
    retries = [attempt(f"r{index}", 1, 110.0 + index) for index in range(2)]
    replaced = await orphans(ends, *samples, *retries)
    assert replaced == {"t2": "r0", "t1": "r1"}


async def test_retries_of_calls_that_were_never_answered_replace_nothing(ends: Ends) -> None:
    assert await orphans(ends, attempt("r0", 1, 110.0), attempt("r1", 1, 111.0)) == {}


async def test_a_call_that_began_after_a_retry_is_a_sample_of_its_own(ends: Ends) -> None:
    assert await orphans(ends, attempt("again", 1, 110.0), attempt("later", 0, 120.0)) == {}


async def test_a_retry_replaces_an_aborted_turn_before_others(ends: Ends) -> None:
    aborted = attempt("aborted", 0, 100.0, finish="abort")
    turns = (aborted, attempt("answered", 0, 101.0), attempt("again", 1, 110.0))
    assert await orphans(ends, *turns) == {"aborted": "again"}


async def test_a_turn_that_was_continued_is_no_orphan(ends: Ends) -> None:
    child = turn("child", parent_id="first", relation="extends")
    assert await orphans(ends, attempt("first", 0, 100.0), child, attempt("again", 1, 110.0)) == {}
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.relation_of(head.by_id["again"]) == "retry"


async def test_a_retry_that_is_appended_again_is_as_it_was(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(attempt("first", 0, 100.0), 200.0)
    stored = await ends.writer.append_turn(attempt("again", 1, 110.0), 200.0)
    assert await ends.writer.append_turn(attempt("again", 1, 110.0), 200.0) == stored
    assert [record.turn_id for record in ends.read()] == ["first", "again"]


async def test_a_call_that_began_after_a_retry_and_ended_before_it_is_a_sample(ends: Ends) -> None:
    assert await orphans(ends, attempt("later", 0, 120.0), attempt("again", 1, 110.0)) == {}


async def test_the_session_of_a_first_call_is_found_by_its_request(ends: Ends) -> None:
    await ends.writer.open_session(spec(ttl_s=100.0))
    await ends.writer.append_turn(attempt("first", 0, 100.0), 200.0, "me")
    child = turn("child", parent_id="first", relation="extends", request_digest="child")
    await ends.writer.append_turn(child, 200.0, "me")
    assert await ends.writer.find_continuations("me", ["q"]) == ["s1"]
    assert await ends.writer.find_continuations("you", ["q"]) == [None]
    assert await ends.writer.find_continuations("me", ["child"]) == [None]


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


def counted(ends: Ends) -> dict[str, int]:
    """The number of sessions and turns for each verdict, without zeros."""
    if isinstance(ends.writer, MemoryStream):
        counts = ends.writer.counts
    else:
        assert ends.redis is not None
        raw: Any = ends.redis.hgetall(keys.VERDICTS)
        counts = {name.decode(): int(count) for name, count in raw.items()}
    return {name: count for name, count in counts.items() if count}


async def test_verdicts_that_are_written_again_count_once(ends: Ends) -> None:
    """If the answer to an acknowledgement is lost, the acknowledgement is repeated."""
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    (entry,) = ends.reader.read(10, 0.01)
    trained = Verdict(code="trained", step=3, version=4)
    for _ in range(2):
        ends.reader.acknowledge([entry.entry_id], Verdicts({"s1": trained}, {("s1", "t1"): trained}))
    assert counted(ends) == {"session:trained": 1, "turn:trained": 1}


async def test_a_verdict_that_takes_the_place_of_another_is_counted_in_its_place(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(status="failed"), None, Verdict(code="failed", detail="so"))
    trained, stale = Verdict(code="trained", step=3, version=4), Verdict(code="stale")
    ends.reader.acknowledge([], Verdicts({}, {("s1", "t1"): stale}))
    ends.reader.acknowledge([], Verdicts({"s1": trained}, {("s1", "t1"): trained}))
    assert counted(ends) == {"session:trained": 1, "turn:trained": 1}


async def test_a_verdict_brings_no_deleted_session_back(ends: Ends) -> None:
    trained = Verdict(code="trained", step=3, version=4)
    ends.reader.acknowledge([], Verdicts({"gone": trained}, {("gone", "t1"): trained}))
    assert await ends.writer.load("gone") is None
    assert counted(ends) == {}
    assert ends.redis is None or not ends.redis.exists(keys.session("gone"))


async def test_a_number_is_kept_once_and_a_higher_one_after_it(ends: Ends) -> None:
    assert ends.reader.reserve(3, "file:///3") < 3
    assert [ends.reader.reserve(number, "file:///other") for number in (3, 2)] == [3, 3]
    assert ends.reader.reserve(5, "file:///5") == 3


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


# Tests that need a real Redis


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = redis_at(redis_url)
    client.flushdb()
    yield client
    client.close()


def test_acknowledged_entries_leave_the_stream_and_owed_ones_never(redis: Redis) -> None:
    reader = claimed_reader(redis)
    for index in range(5):
        redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn(f"t{index}"))})
    entries = reader.read(3, 0.01)
    reader.acknowledge([entries[0].entry_id, entries[2].entry_id], NOTHING)
    raw: Any = redis.xrange(keys.STREAM)
    left = [entry_id.decode() for entry_id, _ in raw]
    assert left[:2] == [entries[1].entry_id, entries[2].entry_id]
    assert len(left) == 4


def test_a_record_nobody_can_read_is_set_aside_with_its_bytes(redis: Redis) -> None:
    reader = claimed_reader(redis)
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: b"\x09nonsense"})
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn())})
    assert [entry.record for entry in reader.read(10, 0.01)] == [turn()]
    letters: Any = redis.xrange(keys.DEAD_LETTERS)
    ((_, letter),) = letters
    assert letter[keys.STREAM_FIELD] == b"\x09nonsense"
    assert b"schema 9" in letter[b"error"]
    assert len(list(reader.reclaim())) == 1


def test_a_second_reader_takes_up_what_the_first_left(redis: Redis) -> None:
    first = claimed_reader(redis)
    redis.xadd(keys.STREAM, {keys.STREAM_FIELD: encode(turn())})
    first.read(10, 0.01)
    assert [entry.record for entry in claimed_reader(redis).reclaim()] == [turn()]


async def test_a_redis_that_is_gone_is_storage_unavailable(tmp_path: Path) -> None:
    nowhere = async_redis_at(f"unix://{tmp_path}/nobody")
    with pytest.raises(StorageUnavailable):
        await RedisWriter(nowhere).append_turn(turn(), 200.0)
    with pytest.raises(StorageUnavailable):
        await RedisWriter(nowhere).open_session(spec())


async def test_a_call_in_time_wins_over_a_gateway_that_saw_the_old_deadline(
    redis: Redis, redis_url: str
) -> None:
    connection = async_redis_at(redis_url)
    writer = RedisWriter(connection)
    await writer.open_session(spec(ttl_s=10.0))
    with pytest.MonkeyPatch.context() as patch:
        before_script(patch, connection, session_scripts.EXPIRE, lambda: writer.append_turn(turn(), 500.0))
        assert await writer.expire(now=111.0, limit=10) == 0
    assert redis.xlen(keys.STREAM) == 1
    await writer.close()
    await connection.aclose()


async def test_of_attempts_that_are_appended_at_once_one_stays(redis: Redis, redis_url: str) -> None:
    connections = [async_redis_at(redis_url) for _ in range(6)]
    writers = [RedisWriter(connection) for connection in connections]
    for round_ in range(20):
        name = f"s{round_}"
        await writers[0].open_session(spec(name))
        attempts = [
            turn(f"t{each}", name, attempt=each, started_at=100.0 + each, request_digest="q")
            for each in range(len(writers))
        ]
        await asyncio.gather(
            *(
                writer.append_turn(each, 200.0)
                for writer, each in zip(writers, attempts[round_ % 6 :] + attempts[: round_ % 6], strict=True)
            )
        )
        head = await writers[0].load(name)
        assert head is not None
        assert set(head.by_id) - set(head.orphans) == {"t5"}
    for writer in writers:
        await writer.close()
    for connection in connections:
        await connection.aclose()


async def test_a_full_redis_takes_a_record_whole_or_not_at_all(redis: Redis, redis_url: str) -> None:
    connection = async_redis_at(redis_url)
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
    await writer.close()
    await connection.aclose()


async def test_sessions_expire_on_a_full_redis(redis: Redis, redis_url: str) -> None:
    """An open session keeps memory from being freed until it expires."""
    async with async_redis_at(redis_url) as connection:
        writer = RedisWriter(connection)
        await writer.open_session(spec(ttl_s=10.0))
        redis.config_set("maxmemory", 1)
        try:
            assert await writer.expire(now=111.0, limit=10) == 1
        finally:
            redis.config_set("maxmemory", 0)
        assert redis.xlen(keys.STREAM) == 1
        await writer.close()


def test_replacing_a_field_keeps_a_record_valid() -> None:
    assert msgspec.structs.replace(turn(), train=False).train is False


async def test_a_call_sees_what_other_gateways_wrote(ends: Ends, redis_url: str) -> None:
    """Heads are cached between calls, and an outdated head is never used."""
    other = ends.writer
    redis = async_redis_at(redis_url)
    if isinstance(ends.writer, RedisWriter):
        other = RedisWriter(redis)
    await ends.writer.open_session(spec())
    for number, writer in enumerate([ends.writer, other, other, ends.writer, other]):
        for reader in (ends.writer, other):
            head = await reader.load_for_call("s1")
            assert head is not None
            assert head == await reader.load("s1")
        each = turn(f"t{number}", finished_at=101.0 + number)
        await writer.append_turn(each, 200.0)
        await writer.append_turn(each, 200.0)  # its answer was lost
    await other.append_outcome(outcome(), None, None)
    for reader in (ends.writer, other):
        head = await reader.load_for_call("s1")
        assert head is not None
        assert len(head.turns) == 5
        assert head.state == "waiting_reward"
    assert await ends.writer.load_for_call("nobody") is None
    if other is not ends.writer:
        await other.close()
    await redis.aclose()


async def test_the_first_turn_opens_a_session_that_is_not_there(ends: Ends) -> None:
    with pytest.raises(SessionClosed, match="unknown"):
        await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_turn(turn("t1"), 200.0, opening=spec(user="u"))
    await ends.writer.append_turn(turn("t2", finished_at=102.0), 200.0, opening=spec(user="u"))
    head = await ends.writer.load("s1")
    assert head is not None
    assert head.spec == spec(user="u")
    assert [each.turn_id for each in head.turns] == ["t1", "t2"]
    assert [named(each) for each in await ends.writer.sessions(LIST_START, 10)] == ["s1"]
    await ends.writer.append_outcome(outcome(), None, None)
    with pytest.raises(SessionClosed, match="closed"):
        await ends.writer.append_turn(turn("t3"), 200.0, opening=spec(user="u"))


async def test_remembered_heads_are_bounded() -> None:
    cache = HeadCache(limit=40_000)
    for number in range(50):
        session_id = f"s{number}"
        cache.put(1, SessionHead(spec=spec(session_id)))
        cache.grow(1, 2, turn("t", session_id, context_ids=TokenIds(range(200))))
    assert 0 < len(cache) <= 5
    kept = cache.get("s49")
    assert kept is not None
    assert kept.fields == 2
    assert cache.get("s0") is None


Connect = type[PipelinedConnection] | type[PooledConnection]


@pytest.fixture(params=[PipelinedConnection, PooledConnection])
def connect(request: pytest.FixtureRequest) -> Connect:
    return cast(Connect, request.param)


async def test_an_answer_that_was_lost_with_its_connection_is_asked_for_again(
    connect: Connect, redis_url: str
) -> None:
    redis = async_redis_at(redis_url)
    connection = connect(redis)
    answers = await asyncio.gather(*(connection.command("ECHO", number) for number in range(300)))
    assert answers == [str(number).encode() for number in range(300)]
    await redis.client_kill_filter(_type="normal", skipme=True)
    assert await connection.command("ECHO", "again") == b"again"
    with pytest.raises(ResponseError):
        await connection.command("NO-SUCH-COMMAND")
    await connection.close()
    await redis.aclose()


async def test_a_redis_that_is_silent_is_given_up(connect: Connect, redis_url: str) -> None:
    redis = async_redis_at(redis_url)
    connection = connect(redis, timeout_s=0.2)
    started = asyncio.get_running_loop().time()
    with pytest.raises(RedisTimeoutError):
        await connection.command("BLPOP", "nothing-comes-here", 60)
    assert asyncio.get_running_loop().time() - started < 30
    assert await connection.command("ECHO", "back") == b"back"
    await connection.close()
    await redis.aclose()


async def test_one_caller_who_leaves_disturbs_no_other(connect: Connect, redis_url: str) -> None:
    """A caller is cancelled while its large command waits for a slow socket. Others get their own answers."""
    redis = async_redis_at(redis_url)
    connection = connect(redis)
    await connection.command("PING")
    for number in range(5):
        await redis.client_pause(100)
        leaving = asyncio.create_task(connection.command("SET", "large", b"x" * 20_000_000))
        await asyncio.sleep(0.02)  # the command is larger than any buffer, so that it is half sent now
        leaving.cancel()
        asked = [f"{number}-{index}" for index in range(20)]
        heard = await asyncio.gather(*(connection.command("ECHO", each) for each in asked))
        assert [each.decode() for each in heard] == asked
        await asyncio.gather(leaving, return_exceptions=True)
    await connection.command("DEL", "large")
    await connection.close()
    await redis.aclose()


async def test_a_redis_that_takes_the_call_and_says_nothing_is_given_up_for_all(connect: Connect) -> None:
    silent = asyncio.Event()

    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    redis = AsyncRedis(host=host, port=port)
    connection = connect(redis, timeout_s=3.0)
    started = asyncio.get_running_loop().time()
    heard = await asyncio.gather(*(connection.command("PING") for _ in range(8)), return_exceptions=True)
    assert all(isinstance(each, RedisTimeoutError) for each in heard), heard
    assert asyncio.get_running_loop().time() - started < 8 * 3.0, "one after the other"
    await connection.close()
    silent.set()
    server.close()
    await redis.aclose()


def test_the_pipelined_connection_was_written_for_this_redis_py() -> None:
    """It uses private attributes of redis-py. After an upgrade, follow the text at WRITTEN_FOR."""
    assert version("redis") == WRITTEN_FOR


async def test_rewards_that_could_add_up_to_infinity_are_refused(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_reward(reward("a", value=1e308))
    for value in (1e308, -1e308):
        with pytest.raises(RewardsTooLarge):
            await ends.writer.append_reward(reward("b", value=value))
        with pytest.raises(RewardsTooLarge):
            await ends.writer.append_outcome(outcome(), reward("finish", value=value), None)
    await ends.writer.append_outcome(outcome(), reward("finish", value=0.5), None)
    assert ends.read() == [reward("a", value=1e308), reward("finish", value=0.5), outcome()]
