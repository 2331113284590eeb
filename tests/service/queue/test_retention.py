"""Settled sessions are forgotten as a whole, and counted. Sessions that a trainer may still need are not."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.episodes import Episode
from rollout_queue.contract.errors import Conflict, SessionClosed, SessionForgotten, SessionUnknown
from rollout_queue.contract.listing import LIST_START
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import keys, retention
from rollout_queue.redis.deletion import RedisDeleter
from rollout_queue.redis.reader import RedisReader
from rollout_queue.redis.restore import restore
from rollout_queue.redis.retention import RedisForgetter
from rollout_queue.redis.scripts import retention as retention_scripts
from rollout_queue.redis.writer import RedisWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.redis_faults import before_script

TRAINED = Verdict(code="trained", step=3, version=3)
FAILED = Verdict(code="failed", detail="it fell over")


class Stream:
    """Both ends of one stream, and its forgetter. Gateway and trainer have different Redis clients."""

    def __init__(self, url: str) -> None:
        self.redis, self.sync = async_redis_at(url), redis_at(url)
        self.sync.flushdb()
        self.writer, self.forgetter = RedisWriter(self.redis), RedisForgetter(self.redis)
        self.reader: RedisReader = claimed_reader(self.sync)

    async def episode(self, name: str = "s1", turns: int = 1, **terms: Any) -> None:
        """Write a session that has ended with a reward and has no verdict."""
        await self.writer.open_session(spec(name, **terms))
        for number in range(turns):
            await self.writer.append_turn(turn(f"{name}-t{number}", name), 200.0)
        await self.writer.append_outcome(outcome(session_id=name), reward("finish", session_id=name), None)

    def learn(self, verdict: Verdict = TRAINED) -> None:
        """The trainer reads all entries and acknowledges them with `verdict`."""
        entries = self.reader.read(1000, 0.01)
        names = {entry.record.session_id for entry in entries}
        turns = {
            (entry.record.session_id, entry.record.turn_id)
            for entry in entries
            if isinstance(entry.record, Turn)
        }
        verdicts = Verdicts(dict.fromkeys(names, verdict), dict.fromkeys(turns, verdict))
        self.reader.acknowledge([entry.entry_id for entry in entries], verdicts)

    async def forgotten(self, most: int = 100) -> Counter[str]:
        """Forget settled sessions of any age; return their verdicts."""
        return (await self.forgetter.forget(0, most)).verdicts

    def left(self) -> set[str]:
        """Every key except those of the stream and the trainer."""
        names: Any = self.sync.keys()
        return {name.decode() for name in names} - {keys.STREAM, keys.FENCE, keys.LEASE}

    def counts(self, key: str) -> dict[str, int]:
        found: Any = self.sync.hgetall(key)
        return {name.decode(): int(number) for name, number in found.items()}


@pytest.fixture
async def stream(redis_url: str) -> AsyncIterator[Stream]:
    stream = Stream(redis_url)
    yield stream
    stream.sync.config_set("maxmemory", 0)
    await stream.writer.close()
    await stream.redis.aclose()
    stream.sync.close()


async def test_what_is_forgotten_leaves_counters_and_its_id(stream: Stream) -> None:
    await stream.writer.open_session(spec(owner="me", user="ann", group_id="g", group_size=1))
    told = {"reply_digest": "d", "request_digest": "q", "finish": "tool_calls", "user": "bob"}
    await stream.writer.append_turn(turn(completion_id="c", **told), 1e12, "me")
    stream.sync.set(keys.response("c"), "what it said")
    for place in (keys.OPEN, keys.open_of("me"), keys.UNTRAINED):
        stream.sync.zadd(place, {"s1": 1.0})
    await stream.writer.append_outcome(outcome(), reward("finish"), None)
    assert not await stream.forgotten()
    stream.learn()
    assert await stream.forgotten() == {"trained": 1}
    assert stream.left() == {keys.VERDICTS, keys.FORGOTTEN, keys.FORGOTTEN_IDS}
    assert stream.counts(keys.VERDICTS) == {"session:trained": 1, "turn:trained": 1}
    assert stream.counts(keys.FORGOTTEN) == {"session:trained": 1, "turn:trained": 1, "tokens:trained": 2}
    assert await stream.writer.load("s1") is None
    assert await stream.writer.load_for_call("s1") is None
    assert await stream.writer.tombstone("s1") is None
    assert list(await stream.writer.sessions(LIST_START, 10)) == []
    assert not await stream.forgotten()


async def test_the_oldest_go_first_and_only_those_that_are_old_enough(stream: Stream) -> None:
    for name in ("a", "b", "c"):
        await stream.episode(name)
        stream.learn()
    hour_ms = 3600_000
    for hours, name in enumerate(("c", "a", "b"), start=1):
        stream.sync.zincrby(keys.SETTLED, -hours * hour_ms, name)
    assert (await stream.forgetter.forget(2.5 * 3600, 100)).verdicts == {"trained": 1}
    assert await stream.writer.load("b") is None
    assert await stream.forgotten(most=1) == {"trained": 1}
    assert await stream.writer.load("a") is None
    assert await stream.writer.load("c") is not None


async def test_sessions_that_are_not_settled_stay(stream: Stream) -> None:
    await stream.writer.open_session(spec("open"))
    await stream.writer.open_session(spec("unrewarded"))
    await stream.writer.append_outcome(outcome(session_id="unrewarded"), None, None)
    await stream.episode("ended")
    stream.reader.acknowledge([entry.entry_id for entry in stream.reader.read(100, 0.01)], Verdicts({}, {}))
    assert not await stream.forgotten()
    assert await stream.writer.expire(now=1e10, limit=10) == 2
    assert not await stream.forgotten(), "the trainer has yet to read that they expired"
    stream.learn()
    assert await stream.forgotten() == {"trained": 2}  # the two expired ones, by this trainer's verdict
    assert await stream.writer.load("ended") is not None


@pytest.mark.parametrize("read", [False, True])
async def test_a_session_with_a_waiting_entry_is_not_forgotten(stream: Stream, read: bool) -> None:
    """The entry waits to be read or to be acknowledged. Sessions settled before the entry are forgotten."""
    await stream.episode("before")
    stream.learn()
    began = time.time()
    while time.time() - began < 0.002:  # so that later entries have later ids, which count milliseconds
        pass
    await stream.writer.open_session(spec())
    await stream.writer.append_turn(turn(), 200.0)
    await stream.writer.append_outcome(outcome(status="failed"), None, FAILED)
    entries = stream.reader.read(100, 0.01) if read else []
    assert await stream.forgotten() == {"trained": 1}
    assert await stream.writer.load("s1") is not None
    entries = entries or stream.reader.read(100, 0.01)
    stream.reader.acknowledge([entries[0].entry_id], Verdicts({}, {}))
    assert not await stream.forgotten()
    stream.reader.acknowledge([entries[1].entry_id], Verdicts({}, {}))
    assert await stream.forgotten() == {"failed": 1}


async def test_a_clock_that_was_set_back_forgets_nothing_that_waits(stream: Stream) -> None:
    """The stream's ids still grow. A session never counts as settled before the newest id's time."""
    ahead = int(time.time() * 1000) + 3600_000
    stream.sync.xadd(keys.STREAM, {keys.STREAM_FIELD: b"?"}, id=f"{ahead}-0")
    stream.reader.read(100, 0.01)
    await stream.episode("s1")
    await stream.writer.open_session(spec("s2"))
    await stream.writer.append_outcome(outcome(session_id="s2", status="failed"), None, FAILED)
    assert stream.sync.zscore(keys.SETTLED, "s2") == ahead
    stream.learn()
    assert stream.sync.zscore(keys.SETTLED, "s1") == ahead


async def test_without_a_trainer_whatever_is_in_the_stream_waits(stream: Stream) -> None:
    await stream.writer.open_session(spec())
    await stream.writer.append_outcome(outcome(status="failed"), None, FAILED)
    stream.sync.xgroup_destroy(keys.STREAM, keys.GROUP)
    assert not await stream.forgotten()
    stream.sync.delete(keys.STREAM)
    assert await stream.forgotten() == {"failed": 1}


async def test_what_changes_meanwhile_is_left_for_the_next_time(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.episode()
    stream.learn()
    with monkeypatch.context() as patch:
        late = reward("late")
        before_script(
            patch, stream.redis, retention_scripts.FORGET, lambda: stream.writer.append_reward(late)
        )
        assert not await stream.forgotten()
    head = await stream.writer.load("s1")
    assert head is not None
    assert {each.key for each in head.rewards} == {"finish", "late"}
    assert await stream.forgotten() == {"trained": 1}


async def test_two_gateways_forget_a_session_once(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await stream.episode(f"s{number}", turns=2)
    stream.learn()
    other, seen = RedisForgetter(stream.redis), list[Counter[str]]()

    async def overtake() -> None:
        seen.append((await other.forget(0, 3)).verdicts)

    before_script(monkeypatch, stream.redis, retention_scripts.FORGET, overtake)
    assert (await stream.forgotten(), seen) == ({"trained": 2}, [{"trained": 3}])
    assert stream.counts(keys.FORGOTTEN) == {"session:trained": 5, "turn:trained": 10, "tokens:trained": 20}


async def test_nothing_is_added_to_what_is_forgotten(stream: Stream) -> None:
    await stream.episode()
    stream.learn()
    await stream.forgotten()
    with pytest.raises(SessionUnknown):
        await stream.writer.append_reward(reward())
    with pytest.raises(SessionUnknown):
        await stream.writer.append_outcome(outcome(), None, FAILED)
    with pytest.raises(SessionUnknown):
        await stream.writer.append_turn(turn("t2"), 200.0)
    # A call that named no session makes one with its first turn.
    with pytest.raises(SessionClosed, match="forgotten"):
        await stream.writer.append_turn(turn("t2"), 200.0, opening=spec())
    stream.reader.acknowledge([], Verdicts({"s1": TRAINED}, {("s1", "s1-t0"): TRAINED}))
    assert stream.left() == {keys.VERDICTS, keys.FORGOTTEN, keys.FORGOTTEN_IDS}
    assert stream.counts(keys.VERDICTS)["session:trained"] == 1
    assert await RedisDeleter(stream.redis).delete_session("s1") is None


async def test_an_id_that_a_trainer_may_know_is_not_given_again(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would take the new session's turns for late turns of the old one, and not train them."""
    monkeypatch.setattr(retention, "IDS_KEPT", 3)
    await stream.episode(group_id="g", group_size=1)
    stream.learn()
    await stream.forgotten()
    with pytest.raises(SessionForgotten):
        await stream.writer.open_session(spec())
    with pytest.raises(Conflict, match="forgotten"):
        await stream.writer.open_session(spec("s2", group_id="g"))
    with pytest.raises(Conflict, match="forgotten"):
        await stream.writer.open_group([spec("s2", group_id="g")])
    for again in (spec(), spec("s2", group_id="g")):
        assert restore(stream.sync, Episode(spec=again)) == "forgotten"
    assert await stream.writer.load("s2") is None
    for number in range(3):
        await stream.episode(f"other-{number}")
        stream.learn()
        await stream.forgotten()
    assert stream.sync.zcard(keys.FORGOTTEN_IDS) == 3
    assert (await stream.writer.open_session(spec()))[1]
    await stream.writer.open_group([spec("s2", group_id="g")])


async def test_a_group_is_there_until_its_last_member_is_forgotten(stream: Stream) -> None:
    """The group keeps its size: forgotten members still hold their places, and nothing waits for them."""
    for name in ("a", "b"):
        await stream.episode(name, group_id="g", group_size=3)
    await stream.writer.open_session(spec("open", group_id="g", group_size=3))
    stream.learn()
    assert await stream.forgotten() == {"trained": 2}
    standing = await stream.writer.group_progress("g")
    assert (standing.size, standing.ended, standing.open, standing.missing) == (3, 2, 1, 0)
    with pytest.raises(Conflict, match="3 sessions"):
        await stream.writer.open_session(spec("one too many", group_id="g"))
    assert stream.sync.hget(keys.group("g"), "forgotten") == b"2"
    await stream.writer.append_outcome(outcome(session_id="open", status="failed"), None, FAILED)
    stream.learn()
    assert (await stream.forgotten()).total() == 1
    assert stream.left() == {keys.VERDICTS, keys.FORGOTTEN, keys.FORGOTTEN_IDS}


async def test_a_group_goes_when_only_deleted_members_are_left(stream: Stream) -> None:
    for name in ("a", "b"):
        await stream.episode(name, group_id="g", group_size=2)
    stream.learn()
    await RedisDeleter(stream.redis).delete_session("a")
    stream.learn()
    assert await stream.forgotten() == {"trained": 1}
    assert not stream.sync.exists(keys.group("g"), keys.group_members("g"))
    assert stream.sync.zcard(keys.SETTLED) == 0


async def test_a_session_that_this_build_cannot_read_stays_and_delays_no_other(stream: Stream) -> None:
    await stream.episode("newer")
    stream.learn()
    stream.sync.hset(keys.session("newer"), "t:newer", b"\xff?")
    await stream.episode("s1")
    stream.learn()
    stream.sync.zincrby(keys.SETTLED, -5000, "newer")
    full(stream)
    assert not await stream.forgotten(most=1)
    assert await stream.forgotten(most=1) == {"trained": 1}
    assert stream.sync.exists(keys.session("newer"))
    assert await RedisDeleter(stream.redis).delete_session("newer") is not None


async def test_a_session_that_an_older_build_settled_is_forgotten_too(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ADOPTED_AT_ONCE", 10)
    names = [f"s{number}" for number in range(200)]
    for name in names:
        await stream.writer.open_session(spec(name))
    for name in names[:150]:
        stream.sync.hset(keys.session(name), "verdict", msgspec.json.encode(TRAINED))
    full(stream)
    await looked_through(stream)
    assert (await stream.forgotten(most=1000)).total() == 150
    assert len(await stream.writer.sessions(LIST_START, 1000)) == 50


async def test_what_was_imported_with_its_verdict_is_settled(stream: Stream) -> None:
    ended = outcome(status="failed")
    assert (
        restore(stream.sync, Episode(spec=spec(), turns=(turn(),), outcome=ended, verdict=FAILED))
        == "restored"
    )
    assert not await stream.forgotten()
    stream.reader.acknowledge([entry.entry_id for entry in stream.reader.read(10, 0.01)], Verdicts({}, {}))
    assert await stream.forgotten() == {"failed": 1}


async def test_what_another_build_settles_beside_this_one_is_found_later(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await looked_through(stream)
    await stream.writer.open_session(spec())
    stream.sync.hset(keys.session("s1"), "verdict", msgspec.json.encode(TRAINED))
    await stream.forgetter.adopt()
    assert not await stream.forgotten()
    monkeypatch.setattr(retention, "ADOPTED_EVERY_S", 0.0)
    await looked_through(stream)
    assert await stream.forgotten() == {"trained": 1}


async def test_a_group_of_any_size_loses_its_members_and_begins_anew(stream: Stream) -> None:
    for name in ("a", "b"):
        await stream.episode(name, group_id="g")
    await stream.writer.open_session(spec("open", group_id="g"))
    stream.learn()
    assert await stream.forgotten() == {"trained": 2}
    assert stream.sync.smembers(keys.group_members("g")) == {b"open"}
    await stream.writer.append_outcome(outcome(session_id="open", status="failed"), None, FAILED)
    stream.learn()
    await stream.forgotten()
    assert stream.left() == {keys.VERDICTS, keys.FORGOTTEN, keys.FORGOTTEN_IDS}
    assert (await stream.writer.open_session(spec("c", group_id="g")))[1]


async def test_the_entry_that_keeps_settled_sessions_is_named(stream: Stream) -> None:
    await stream.writer.append_turn(turn("open-t", session_id="open"), 200.0, opening=spec("open"))
    await stream.writer.open_session(spec("s2"))
    await stream.writer.append_outcome(outcome(session_id="s2", status="failed"), None, FAILED)
    entries: Any = stream.sync.xrange(keys.STREAM)
    assert await stream.forgetter.forget(0, 10) == (Counter(), 0, entries[0][0].decode())
    stream.learn()
    assert (await stream.forgetter.forget(0, 10)).held_by == ""


async def looked_through(stream: Stream) -> None:
    """Call `adopt` until its scan has looked at all sessions."""
    scan, cursors = stream.redis.zscan, list[int]()

    async def scan_and_note(*given: Any, **more: Any) -> Any:
        found = await scan(*given, **more)
        cursors.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.redis, "zscan", scan_and_note)
        while not cursors or cursors[-1]:
            await stream.forgetter.adopt()


def full(stream: Stream) -> None:
    stream.sync.config_set("maxmemory", 1)
