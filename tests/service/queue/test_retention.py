"""Settled sessions are forgotten as a whole, and counted. Sessions that a trainer may still need are not."""

import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from rollout_queue.contract.errors import Conflict, SessionClosed, SessionForgotten, SessionUnknown
from rollout_queue.contract.export_rows import Episode
from rollout_queue.contract.head import LIST_START
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names, session_retention
from rollout_queue.redis.record_restore import restore
from rollout_queue.redis.session_retention import RedisForgetter
from tests.support.queue.ends import NOTHING, TRAINED, Ends
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_faults import before_script

FAILED = Verdict(code="failed", detail="it fell over")


async def test_what_is_forgotten_leaves_counters_and_its_id(stream: Ends) -> None:
    await stream.writer.open_session(spec(owner="me", user="ann", group_id="g", group_size=1))
    told = {"reply_digest": "d", "request_digest": "q", "finish": "tool_calls", "user": "bob"}
    await stream.writer.append_turn(turn(completion_id="c", **told), 1e12, "me")
    stream.redis.set(key_names.response("c"), "what it said")
    for place in (key_names.OPEN, key_names.open_of("me"), key_names.UNTRAINED):
        stream.redis.zadd(place, {"s1": 1.0})
    await stream.writer.append_outcome(outcome(), reward("finish"), None)
    assert not await stream.forgotten()
    stream.learn()
    assert await stream.forgotten() == {"trained": 1}
    assert stream.left() == {key_names.VERDICTS, key_names.FORGOTTEN, key_names.FORGOTTEN_IDS}
    assert stream.counts(key_names.VERDICTS) == {"session:trained": 1, "turn:trained": 1}
    assert stream.counts(key_names.FORGOTTEN) == {
        "session:trained": 1,
        "turn:trained": 1,
        "tokens:trained": 2,
    }
    assert await stream.writer.load("s1") is None
    assert await stream.writer.load_for_call("s1") is None
    assert await stream.writer.tombstone("s1") is None
    assert list(await stream.writer.sessions(LIST_START, 10)) == []
    assert not await stream.forgotten()


async def test_the_oldest_go_first_and_only_those_that_are_old_enough(stream: Ends) -> None:
    for name in ("a", "b", "c"):
        await stream.episode(name)
        stream.learn()
    hour_ms = 3600_000
    for hours, name in enumerate(("c", "a", "b"), start=1):
        stream.redis.zincrby(key_names.SETTLED, -hours * hour_ms, name)
    assert (await stream.forgetter.forget(2.5 * 3600, 100)).verdicts == {"trained": 1}
    assert await stream.writer.load("b") is None
    assert await stream.forgotten(most=1) == {"trained": 1}
    assert await stream.writer.load("a") is None
    assert await stream.writer.load("c") is not None


async def test_sessions_that_are_not_settled_stay(stream: Ends) -> None:
    await stream.writer.open_session(spec("open"))
    await stream.writer.open_session(spec("unrewarded"))
    await stream.writer.append_outcome(outcome("unrewarded"), None, None)
    await stream.episode("ended")
    stream.acknowledge()
    assert not await stream.forgotten()
    assert await stream.writer.expire(now=1e10, limit=10) == 2
    assert not await stream.forgotten(), "the trainer has yet to read that they expired"
    stream.learn()
    assert await stream.forgotten() == {"trained": 2}  # the two expired ones, by this trainer's verdict
    assert await stream.writer.load("ended") is not None


@pytest.mark.parametrize("read", [False, True])
async def test_a_session_with_a_waiting_entry_is_not_forgotten(stream: Ends, read: bool) -> None:
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
    stream.reader.acknowledge([entries[0].entry_id], NOTHING)
    assert not await stream.forgotten()
    stream.reader.acknowledge([entries[1].entry_id], NOTHING)
    assert await stream.forgotten() == {"failed": 1}


async def test_a_clock_that_was_set_back_forgets_nothing_that_waits(stream: Ends) -> None:
    """The stream's ids still grow. A session never counts as settled before the newest id's time."""
    ahead = int(time.time() * 1000) + 3600_000
    stream.redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b"?"}, id=f"{ahead}-0")
    stream.reader.read(100, 0.01)
    await stream.episode("s1")
    await stream.writer.open_session(spec("s2"))
    await stream.writer.append_outcome(outcome("s2", status="failed"), None, FAILED)
    assert stream.redis.zscore(key_names.SETTLED, "s2") == ahead
    stream.learn()
    assert stream.redis.zscore(key_names.SETTLED, "s1") == ahead


async def test_without_a_trainer_whatever_is_in_the_stream_waits(stream: Ends) -> None:
    await stream.writer.open_session(spec())
    await stream.writer.append_outcome(outcome(status="failed"), None, FAILED)
    stream.redis.xgroup_destroy(key_names.STREAM, key_names.GROUP)
    assert not await stream.forgotten()
    stream.redis.delete(key_names.STREAM)
    assert await stream.forgotten() == {"failed": 1}


async def test_what_changes_meanwhile_is_left_for_the_next_time(
    stream: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.episode()
    stream.learn()
    with monkeypatch.context() as patch:
        late = reward("late")
        before_script(
            patch, stream.client, session_retention.FORGET, lambda: stream.writer.append_reward(late)
        )
        assert not await stream.forgotten()
    assert {each.key for each in (await stream.head()).rewards} == {"finish", "late"}
    assert await stream.forgotten() == {"trained": 1}


async def test_two_gateways_forget_a_session_once(stream: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await stream.episode(f"s{number}", turns=2)
    stream.learn()
    other, seen = RedisForgetter(stream.client), list[Counter[str]]()

    async def overtake() -> None:
        seen.append((await other.forget(0, 3)).verdicts)

    before_script(monkeypatch, stream.client, session_retention.FORGET, overtake)
    assert (await stream.forgotten(), seen) == ({"trained": 2}, [{"trained": 3}])
    assert stream.counts(key_names.FORGOTTEN) == {
        "session:trained": 5,
        "turn:trained": 10,
        "tokens:trained": 20,
    }


async def test_nothing_is_added_to_what_is_forgotten(stream: Ends) -> None:
    await stream.episode()
    stream.learn()
    await stream.forgotten()
    for added in (
        stream.writer.append_reward(reward()),
        stream.writer.append_outcome(outcome(), None, FAILED),
        stream.writer.append_turn(turn("t2"), 200.0),
    ):
        with pytest.raises(SessionUnknown):
            await added
    # A call that named no session makes one with its first turn.
    with pytest.raises(SessionClosed, match="forgotten"):
        await stream.writer.append_turn(turn("t2"), 200.0, opening=spec())
    stream.reader.acknowledge([], Verdicts({"s1": TRAINED}, {("s1", "s1-t0"): TRAINED}))
    assert stream.left() == {key_names.VERDICTS, key_names.FORGOTTEN, key_names.FORGOTTEN_IDS}
    assert stream.counts(key_names.VERDICTS)["session:trained"] == 1
    assert await stream.deleter.delete_session("s1") is None


async def test_an_id_that_a_trainer_may_know_is_not_given_again(
    stream: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would take the new session's turns for late turns of the old one, and not train them."""
    monkeypatch.setattr(session_retention, "IDS_KEPT", 3)
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
        assert restore(stream.redis, Episode(spec=again)) == "forgotten"
    assert await stream.writer.load("s2") is None
    for number in range(3):
        await stream.episode(f"other-{number}")
        stream.learn()
        await stream.forgotten()
    assert stream.redis.zcard(key_names.FORGOTTEN_IDS) == 3
    assert (await stream.writer.open_session(spec()))[1]
    await stream.writer.open_group([spec("s2", group_id="g")])


async def test_a_group_is_there_until_its_last_member_is_forgotten(stream: Ends) -> None:
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
    assert stream.redis.hget(key_names.group("g"), "forgotten") == b"2"
    await stream.writer.append_outcome(outcome("open", status="failed"), None, FAILED)
    stream.learn()
    assert (await stream.forgotten()).total() == 1
    assert stream.left() == {key_names.VERDICTS, key_names.FORGOTTEN, key_names.FORGOTTEN_IDS}


async def test_a_group_goes_when_only_deleted_members_are_left(stream: Ends) -> None:
    for name in ("a", "b"):
        await stream.episode(name, group_id="g", group_size=2)
    stream.learn()
    await stream.deleted("a")
    stream.learn()
    assert await stream.forgotten() == {"trained": 1}
    assert not stream.redis.exists(key_names.group("g"), key_names.group_members("g"))
    assert stream.redis.zcard(key_names.SETTLED) == 0


async def test_a_session_that_this_build_cannot_read_stays_and_delays_no_other(stream: Ends) -> None:
    await stream.episode("newer")
    stream.learn()
    stream.redis.hset(key_names.session("newer"), "t:newer", b"\xff?")
    await stream.episode("s1")
    stream.learn()
    stream.redis.zincrby(key_names.SETTLED, -5000, "newer")
    stream.redis.config_set("maxmemory", 1)
    assert not await stream.forgotten(most=1)
    assert await stream.forgotten(most=1) == {"trained": 1}
    assert stream.redis.exists(key_names.session("newer"))
    await stream.deleted("newer")


async def test_a_session_that_an_older_build_settled_is_forgotten_too(
    stream: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_retention, "ADOPTED_AT_ONCE", 10)
    names = [f"s{number}" for number in range(200)]
    for name in names:
        await stream.writer.open_session(spec(name))
    for name in names[:150]:
        stream.redis.hset(key_names.session(name), "verdict", msgspec.json.encode(TRAINED))
    stream.redis.config_set("maxmemory", 1)
    await looked_through(stream)
    assert (await stream.forgotten(most=1000)).total() == 150
    assert len(await stream.writer.sessions(LIST_START, 1000)) == 50


async def test_what_was_imported_with_its_verdict_is_settled(stream: Ends) -> None:
    ended = outcome(status="failed")
    episode = Episode(spec=spec(), turns=(turn(),), outcome=ended, verdict=FAILED)
    assert restore(stream.redis, episode) == "restored"
    assert not await stream.forgotten()
    stream.acknowledge()
    assert await stream.forgotten() == {"failed": 1}


async def test_what_another_build_settles_beside_this_one_is_found_later(
    stream: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    await looked_through(stream)
    await stream.writer.open_session(spec())
    stream.redis.hset(key_names.session("s1"), "verdict", msgspec.json.encode(TRAINED))
    await stream.forgetter.adopt()
    assert not await stream.forgotten()
    monkeypatch.setattr(session_retention, "ADOPTED_EVERY_S", 0.0)
    await looked_through(stream)
    assert await stream.forgotten() == {"trained": 1}


async def test_a_group_of_any_size_loses_its_members_and_begins_anew(stream: Ends) -> None:
    for name in ("a", "b"):
        await stream.episode(name, group_id="g")
    await stream.writer.open_session(spec("open", group_id="g"))
    stream.learn()
    assert await stream.forgotten() == {"trained": 2}
    assert stream.redis.smembers(key_names.group_members("g")) == {b"open"}
    await stream.writer.append_outcome(outcome("open", status="failed"), None, FAILED)
    stream.learn()
    await stream.forgotten()
    assert stream.left() == {key_names.VERDICTS, key_names.FORGOTTEN, key_names.FORGOTTEN_IDS}
    assert (await stream.writer.open_session(spec("c", group_id="g")))[1]


async def test_the_entry_that_keeps_settled_sessions_is_named(stream: Ends) -> None:
    await stream.writer.append_turn(turn("open-t", session_id="open"), 200.0, opening=spec("open"))
    await stream.writer.open_session(spec("s2"))
    await stream.writer.append_outcome(outcome("s2", status="failed"), None, FAILED)
    entries: Any = stream.redis.xrange(key_names.STREAM)
    assert await stream.forgetter.forget(0, 10) == (Counter(), 0, entries[0][0].decode())
    stream.learn()
    assert (await stream.forgetter.forget(0, 10)).held_by == ""


async def looked_through(stream: Ends) -> None:
    """Call `adopt` until its scan has looked at all sessions."""
    scan, cursors = stream.client.zscan, list[int]()

    async def scan_and_note(*given: Any, **more: Any) -> Any:
        found = await scan(*given, **more)
        cursors.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.client, "zscan", scan_and_note)
        while not cursors or cursors[-1]:
            await stream.forgetter.adopt()
