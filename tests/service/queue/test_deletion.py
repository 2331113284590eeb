"""A deleted session is gone from the stream, the heads and the dead letters, and never comes back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import SessionDeleted, UserDeleted
from rollout_queue.contract.head import LIST_START, DeletionTotals, Tombstone
from rollout_queue.contract.records import Deletion, Record, Verdict
from rollout_queue.contract.stream import GroupMembers, Verdicts
from rollout_queue.redis import key_names, session_deletion
from rollout_queue.redis.session_deletion import OVERDUE_S, PAGE, StreamDeleter
from rollout_queue.redis.session_heads import HeadCache, read_head
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.ends import Ends
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_faults import break_script
from tests.support.redis_process import RedisProcess


def deletion(tombstone: Tombstone, **group: Any) -> Deletion:
    return Deletion(session_id=tombstone.session_id, created_at=tombstone.deleted_at, **group)


async def test_a_deleted_session_leaves_a_tombstone_and_tells_the_trainer(ends: Ends) -> None:
    began = time.time()
    await ends.writer.open_session(spec(owner="me", group_id="g", group_size=2))
    await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_reward(reward())
    await ends.writer.append_outcome(outcome(), reward("finish"), None)
    tombstone = await ends.deleted("s1")
    assert (tombstone.turns, tombstone.rewards) == (1, 2)
    assert (tombstone.session_id, tombstone.owner, tombstone.created_at) == ("s1", "me", 100.0)
    assert began <= tombstone.deleted_at <= time.time()
    assert await ends.writer.tombstone("s1") == tombstone
    assert await ends.writer.load("s1") is None
    assert await ends.writer.load_for_call("s1") is None
    for nothing in ("s1", "nobody"):
        assert await ends.deleter.delete_session(nothing) is None
    assert await ends.writer.tombstone("nobody") is None
    assert ends.read() == [deletion(tombstone, group_id="g", group_size=2)]


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Ends]:
    """On a Redis that nobody else uses."""
    with closing(RedisProcess(tmp_path / "redis").start()) as process:
        async with async_redis_at(process.url) as connection:
            writer = StreamWriter(connection)
            yield Ends(writer, connection, process.client)
            await writer.close()


async def test_a_deletion_costs_no_more_in_a_long_stream(alone: Ends) -> None:
    """Entries are found by their ids. Those of a session of an older build, which notes none, are sought."""
    writer, redis = alone.writer, alone.redis
    for name in ("s1", "old"):
        await writer.open_session(spec(name, group_id=f"g{name}", group_size=1))
        await writer.append_turn(turn(f"t-{name}", name), 200.0)
        await writer.append_reward(reward(session_id=name))
        await writer.append_outcome(outcome(name), reward("finish", session_id=name), None)
    names: Any = redis.hkeys(key_names.session("old"))
    known = [each for each in names if each.startswith(b"e:")]
    assert redis.hdel(key_names.session("old"), *known) == 4
    with redis.pipeline(transaction=False) as others:
        for number in range(3_000):
            others.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(turn(f"other-{number}", "other"))})
        others.execute()
    before = redis.xlen(key_names.STREAM)
    for name, pages in (("s1", 0), ("old", 3_000 // PAGE)):
        redis.config_resetstat()
        assert await alone.deleter.delete_session(name) is not None
        ran = redis.info("commandstats").get("cmdstat_xrange", {"calls": 0})
        assert pages <= ran["calls"] <= 2 * pages
        before -= 4 - 1  # and a Deletion
        assert redis.xlen(key_names.STREAM) == before
    assert not redis.exists(key_names.DELETING)


async def test_nothing_is_added_to_a_deleted_session_nor_is_its_id_given_again(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    tombstone = await ends.deleted("s1")
    for added in (
        ends.writer.open_session(spec()),
        ends.writer.append_turn(turn("t2"), 200.0),
        ends.writer.append_turn(turn("t2"), 200.0, opening=spec()),
        ends.writer.append_turn(turn("t1", attempt=1, request_digest="q"), 200.0),
        ends.writer.append_reward(reward()),
        ends.writer.append_outcome(outcome(), reward("finish"), Verdict(code="failed")),
    ):
        with pytest.raises(SessionDeleted):
            await added
    assert await ends.writer.expire(now=1e10, limit=10) == 0
    assert ends.read() == [deletion(tombstone)]


async def test_what_the_trainer_had_read_is_not_taken_up_again(ends: Ends) -> None:
    for name in ("s1", "s2"):
        await ends.writer.open_session(spec(name))
        await ends.writer.append_turn(turn(session_id=name), 200.0)
    read = ends.reader.read(10, 0.01)
    tombstone = await ends.deleted("s1")
    assert [entry.record for entry in ends.reader.reclaim()] == [turn(session_id="s2")]
    trained = Verdict(code="trained", step=1, version=1)
    verdicts = Verdicts({"s1": trained}, {("s1", "t1"): trained})
    ends.reader.acknowledge([entry.entry_id for entry in read], verdicts)
    assert await ends.writer.load("s1") is None
    assert ends.read() == [deletion(tombstone)]


async def test_a_session_that_is_deleted_after_its_end_counts_only_as_deleted(ends: Ends) -> None:
    """The verdicts of its turns stay counted, and the tombstone has the session's former verdict."""
    for name in ("s1", "s2", "open"):
        await ends.writer.open_session(spec(name, group_id="g", group_size=4))
    await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_outcome(outcome("s2"), None, Verdict(code="failed"))
    trained = Verdict(code="trained", step=1, version=1)
    ends.reader.acknowledge([], Verdicts({"s1": trained}, {("s1", "t1"): trained}))
    assert ends.counts() == {"session:failed": 1, "session:trained": 1, "turn:trained": 1}
    asked = ["s1", "s2", "open", "nobody"]
    assert ends.reader.verdict_codes(asked) == {"s1": "trained", "s2": "failed"}
    for name in asked[:3]:
        await ends.deleter.delete_session(name)
    assert ends.counts() == {"session:deleted": 3, "turn:trained": 1}
    assert ends.reader.verdict_codes(asked) == {"s1": "trained", "s2": "failed", "open": "deleted"}
    assert ends.reader.group_members(["g"]) == {"g": GroupMembers(4, frozenset(asked[:3]))}


async def test_a_deleted_session_keeps_its_place_among_the_others(ends: Ends) -> None:
    for name in ("a", "b", "c"):
        await ends.writer.open_session(spec(name))
    tombstone = await ends.deleted("b")
    first = await ends.writer.sessions(LIST_START, 2)
    listed = [*first, *await ends.writer.sessions(first[-1].position, 2)]
    assert listed[1].found == tombstone
    assert [isinstance(each.found, Tombstone) for each in listed] == [False, True, False]


async def test_nobody_waits_for_a_deleted_member_of_a_group_and_nobody_takes_its_place(ends: Ends) -> None:
    await ends.writer.open_group([spec(name, group_id="g", group_size=2) for name in ("a", "b")])
    await ends.deleted("a")
    standing = await ends.writer.group_progress("g")
    assert (standing.size, standing.ended, standing.open) == (2, 1, 1)


async def test_a_conversation_of_two_sessions_leads_to_the_one_that_is_not_deleted(ends: Ends) -> None:
    told = {"reply_digest": "d", "request_digest": "q", "finish": "tool_calls"}
    for name in ("a", "b"):
        await ends.writer.open_session(spec(name, owner="me"))
        await ends.writer.append_turn(turn(f"turn-{name}", name, **told), 200.0, "me")
    digests = ["d", "q", "turn-a", "turn-b"]
    await ends.deleted("a")
    assert await ends.writer.find_continuations("me", digests) == ["b", "b", None, "b"]
    await ends.deleted("b")
    assert await ends.writer.find_continuations("me", digests) == [None] * 4


async def test_all_sessions_of_a_deleted_user_go_and_new_ones_are_refused(ends: Ends) -> None:
    writer = ends.writer
    await writer.open_session(spec("opened", user="ann"))
    await writer.append_turn(turn("t1", "opened"), 200.0)
    await writer.append_reward(reward("k", "opened"))
    await writer.open_group([spec(name, group_id="g", group_size=2, user="ann") for name in ("m1", "m2")])
    await writer.append_turn(turn("t2", "implied"), 200.0, opening=spec("implied", user="ann"))
    await writer.open_session(spec("called", user="bob"))
    await writer.append_turn(turn("t3", "called", user="ann"), 200.0)
    for name, user in (("bobs", "bob"), ("nobodys", None)):
        await writer.open_session(spec(name, user=user))
    assert not await writer.user_deleted("ann")
    deleted = await ends.deleter.delete_user("ann")
    assert deleted == DeletionTotals(sessions=5, turns=3, rewards=1)
    assert await ends.deleter.delete_user("ann") == DeletionTotals()
    left = [each for each in await writer.sessions(LIST_START, 10) if not isinstance(each.found, Tombstone)]
    assert {each.position.session_id for each in left} == {"bobs", "nobodys"}
    assert await writer.user_deleted("ann")
    assert not await writer.user_deleted("bob")
    for added in (
        writer.open_session(spec("new", user="ann")),
        writer.open_group([spec("new", group_id="new", group_size=1, user="ann")]),
        writer.append_turn(turn("t9", "bobs", user="ann"), 200.0),
        writer.append_turn(turn("t9", "new"), 200.0, opening=spec("new", user="ann")),
    ):
        with pytest.raises(UserDeleted):
            await added
    assert {type(record) for record in ends.read()} == {Deletion}
    assert await ends.deleter.delete_user("bob") == DeletionTotals(sessions=1)


# Tests that need a real Redis


LONG = "x" * 200
"""MessagePack encodes texts of up to 31 bytes in another way than longer ones."""


@pytest.mark.parametrize("gone", ["a", "ab", LONG, LONG[:32], LONG[:31]])
async def test_only_the_records_of_the_session_leave_the_stream(stream: Ends, gone: str) -> None:
    names = ["a", "ab", "b", "session_id", LONG, LONG[:32], LONG[:31]]
    kept: list[bytes] = []
    for name in names:
        await stream.writer.open_session(spec(name))
    for number in range(60):  # several pages
        for name in names:
            record: Record = turn(f"t{number}", name, group_id=gone, task_id=gone)
            record = [record, reward("k", name, source=gone), outcome(name, group_id=gone)][number % 3]
            stream.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(record)})
            kept += [encode(record)] * (name != gone)
    tombstone = await stream.deleted(gone)
    assert stream.records() == [*kept, encode(deletion(tombstone))]
    other = await stream.deleted("b")
    assert stream.records()[-2:] == [encode(deletion(tombstone)), encode(deletion(other))]


async def test_unreadable_bytes_are_deleted_if_they_contain_the_session_id(stream: Ends) -> None:
    newer, own = b"\x09", encode(turn(session_id="s1"))[1:]
    letters = [newer + own, b"\x01" + own[:60], newer + encode(turn(session_id="s11"))[1:], b"\x01nonsense"]
    letters.append(newer + b"tokens of somebody else, among them \xa2s1")
    for letter in letters:
        stream.redis.xadd(
            key_names.DEAD_LETTERS, {key_names.STREAM_FIELD: letter, "entry": "1-1", "error": "unread"}
        )
        stream.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: letter})
    stream.redis.xadd(key_names.DEAD_LETTERS, {key_names.STREAM_FIELD: b"", "entry": "1-1"})
    await stream.writer.open_session(spec("s1"))
    tombstone = await stream.deleted("s1")
    assert stream.records(key_names.DEAD_LETTERS) == [*letters[2:], b""]
    assert stream.records() == [*letters[2:], encode(deletion(tombstone))]


async def test_a_session_that_this_build_cannot_read_is_deleted_all_the_same(stream: Ends) -> None:
    await stream.writer.open_session(spec("s1"))
    stream.redis.hset(key_names.session("s1"), "t:newer", b"\x09" + encode(turn())[1:])
    await stream.deleted("s1")
    assert not stream.redis.exists(key_names.session("s1"))


async def test_what_a_dead_gateway_left_is_finished_by_another(stream: Ends) -> None:
    heir = StreamDeleter(stream.client)
    await stream.writer.open_session(spec())
    await stream.writer.append_turn(turn(), 200.0)
    with pytest.MonkeyPatch.context() as patch:
        break_script(patch, stream.client, session_deletion.REMOVE_ENTRIES)
        tombstone = await stream.deleted("s1")
    assert len(stream.records()) == 2
    assert await heir.finish(time.time()) == 0
    assert await heir.finish(time.time() + OVERDUE_S + 1) == 1
    assert stream.records() == [encode(deletion(tombstone))]
    assert stream.redis.exists(key_names.DELETING) == 0
    assert await heir.finish(time.time() + OVERDUE_S + 1) == 0


async def test_a_full_redis_can_be_relieved(stream: Ends) -> None:
    """The deleted session holds no place and no deadline."""
    await stream.writer.open_session(spec(owner="me", user="ann"))
    await stream.writer.append_turn(turn(), 200.0)
    places = (key_names.OPEN, key_names.open_of("me"), key_names.UNTRAINED)
    for place in places:
        stream.redis.zadd(place, {"s1": 1.0})
    stream.redis.config_set("maxmemory", 1)
    tombstone = await stream.deleted("s1")
    assert stream.records() == [encode(deletion(tombstone))]
    assert not stream.redis.exists(
        key_names.session("s1"), key_names.user_sessions("ann"), key_names.DELETING
    )
    assert not stream.redis.exists(*places, key_names.DEADLINES)
    assert stream.counts() == {"session:deleted": 1}


async def test_turns_that_come_while_their_session_is_deleted_are_refused_or_deleted(
    stream: Ends, redis_url: str
) -> None:
    connections = [async_redis_at(redis_url) for _ in range(4)]
    writers = [StreamWriter(each) for each in connections]
    for round_ in range(20):
        name = f"s{round_}"
        await writers[0].open_session(spec(name))
        appends = [
            writers[number % 4].append_turn(turn(f"t{number}", name), 200.0) for number in range(round_ * 2)
        ]
        ended: list[Any] = await asyncio.gather(
            *appends[:round_], stream.deleter.delete_session(name), *appends[round_:], return_exceptions=True
        )
        (tombstone,) = [each for each in ended if isinstance(each, Tombstone)]
        refused = [each for each in ended if isinstance(each, SessionDeleted)]
        assert tombstone.turns + len(refused) == len(appends)
        assert stream.records()[round_:] == [encode(deletion(tombstone))]
        assert stream.redis.exists(key_names.session(name)) == 0
    for writer, each in zip(writers, connections, strict=True):
        await writer.close()
        await each.aclose()


async def test_a_turn_that_came_while_its_session_was_read_is_deleted_too(
    stream: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def read(fields: Any) -> Any:
        reads.append(len(fields))
        if len(reads) == 1:
            stream.redis.hset(key_names.session("s1"), "t:late", encode(turn("late", reply_digest="d")))
            stream.redis.set(key_names.continuation("me", "d"), "s1")
        return read_head(fields)

    monkeypatch.setattr("rollout_queue.redis.session_deletion.read_head", read)
    await stream.writer.open_session(spec(owner="me"))
    tombstone = await stream.deleted("s1")
    assert reads == [1, 2]
    assert tombstone.turns == 1
    assert await stream.writer.find_continuations("me", ["d"]) == [None]


async def test_heads_that_gateways_remember_are_let_go(stream: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[HeadCache] = []

    def cache(limit: int) -> HeadCache:
        caches.append(HeadCache(limit))
        return caches[-1]

    monkeypatch.setattr("rollout_queue.redis.stream_writer.HeadCache", cache)
    writers = [StreamWriter(stream.client) for _ in range(2)]
    for name in ("s1", "s2"):
        await writers[0].open_session(spec(name))
    for writer in writers:
        for name in ("s1", "s2"):
            assert await writer.load_for_call(name) is not None
    await stream.deleted("s1")
    assert await writers[0].load_for_call("s1") is None
    await writers[1].forget_deleted()
    assert [cache.session_ids() for cache in caches] == [["s2"], ["s2"]]
    for writer in writers:
        await writer.close()
