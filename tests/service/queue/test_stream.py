"""The stream's two ends behave alike in memory and on a real Redis: the same tests run on both."""

from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import (
    MOST_REWARDS,
    Conflict,
    GroupTaken,
    RewardsTooLarge,
    SessionClosed,
    StorageUnavailable,
    TooManyRewards,
)
from rollout_queue.contract.head import LIST_START, GroupProgress, SessionHead
from rollout_queue.contract.records import Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names, session_scripts
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.ends import NOTHING, TRAINED, Ends
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_faults import before_script

LEARNT = Verdicts({"s1": TRAINED}, {("s1", "t1"): TRAINED})


async def test_what_is_appended_is_in_the_head_and_reaches_the_trainer(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), expires_at=200.0)
    await ends.writer.append_reward(reward())
    await ends.writer.append_outcome(outcome(), None, None)
    head = await ends.head()
    assert (head.turns, head.rewards, head.outcome) == ((turn(),), (reward(),), outcome())
    assert ends.read() == [turn(), reward(), outcome()]
    assert await ends.writer.load("nobody") is None


async def test_a_session_is_opened_once(ends: Ends) -> None:
    first, created = await ends.writer.open_session(spec(task_id="a"))
    again, created_again = await ends.writer.open_session(spec(task_id="b"))
    assert (created, created_again) == (True, False)
    assert again == first


@pytest.mark.parametrize(
    ("members", "refused", "why"),
    [
        ([{"group_size": 2}, {"group_size": 2}], {"group_size": 2}, "2 sessions"),
        ([{"group_size": 3}], {"group_size": 2}, "size"),
        ([{"group_size": 3}], {"group_size": 3, "owner": "x"}, "another client"),
        ([{}, {"group_size": 3}], {"group_size": 2}, "size 3"),
    ],
    ids=["full", "another size", "another owner", "a size that was said later"],
)
async def test_a_group_has_one_size_and_one_owner(
    ends: Ends, members: list[dict[str, Any]], refused: dict[str, Any], why: str
) -> None:
    for number, terms in enumerate(members):
        await ends.writer.open_session(spec(f"s{number}", group_id="g", **terms))
    with pytest.raises(Conflict, match=why):
        await ends.writer.open_session(spec("refused", group_id="g", **refused))
    size = members[-1]["group_size"]
    assert await ends.writer.group_progress("g") == GroupProgress(size, ended=0, open=len(members))


async def test_a_group_is_created_once(ends: Ends) -> None:
    members = [spec(name, group_id="g", group_size=2) for name in ("a", "b")]
    await ends.writer.open_group(members)
    with pytest.raises(Conflict, match="exists"):
        await ends.writer.open_group(members)
    with pytest.raises(GroupTaken):
        await ends.writer.open_group([spec("c", group_id="g", group_size=1, owner="x")])
    assert await ends.writer.group_progress("g") == GroupProgress(2, ended=0, open=2)
    await ends.writer.append_outcome(outcome("a"), None, None)
    assert await ends.writer.group_progress("g") == GroupProgress(2, ended=0, open=1, unrewarded=1)


async def test_a_turn_needs_an_open_session(ends: Ends) -> None:
    with pytest.raises(SessionClosed, match="unknown"):
        await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(), None, None)
    with pytest.raises(SessionClosed, match="closed"):
        await ends.writer.append_turn(turn(), 200.0)
    assert ends.read() == [outcome()]


async def test_a_reward_key_counts_once(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_reward(reward("finish", value=1.0))
    assert await ends.writer.append_reward(reward("finish", value=0.5)) == reward("finish", value=1.0)
    await ends.writer.append_outcome(outcome(), reward("finish", value=0.5), None)
    assert (await ends.head()).rewards == (reward("finish", value=1.0),)
    assert ends.read() == [reward("finish", value=1.0), outcome()]


async def test_a_reward_after_the_verdict_is_kept_as_late_and_not_sent(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(status="failed"), None, Verdict(code="failed"))
    stored = await ends.writer.append_reward(reward())
    assert stored.late
    assert (await ends.head()).rewards == (stored,)
    assert ends.read() == [outcome(status="failed")]


async def test_rewards_that_would_add_up_to_too_much_are_refused(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_reward(reward("a", value=0.9e9))
    for value in (0.9e9, -0.9e9):
        with pytest.raises(RewardsTooLarge):
            await ends.writer.append_reward(reward("b", value=value))
        with pytest.raises(RewardsTooLarge):
            await ends.writer.append_outcome(outcome(), reward("finish", value=value), None)
    await ends.writer.append_outcome(outcome(), reward("finish", value=0.5), None)
    assert ends.read() == [reward("a", value=0.9e9), reward("finish", value=0.5), outcome()]


async def test_a_session_takes_a_thousand_rewards(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    for number in range(MOST_REWARDS):
        await ends.writer.append_reward(reward(str(number), value=0.5))
    for _ in range(2):
        with pytest.raises(TooManyRewards):
            await ends.writer.append_reward(reward("more"))
    with pytest.raises(TooManyRewards):
        await ends.writer.append_outcome(outcome(), reward("finish"), None)
    assert await ends.writer.append_reward(reward("7", value=9.0)) == reward("7", value=0.5)
    assert await ends.writer.append_outcome(outcome(), None, None) == outcome()
    assert len((await ends.head()).rewards) == MOST_REWARDS


async def test_what_is_appended_again_is_there_once(ends: Ends) -> None:
    """A turn may come again after the end, and the first end stands."""
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    await ends.writer.append_outcome(outcome(), reward("finish"), None)
    await ends.writer.append_turn(turn(), 200.0)
    assert await ends.writer.append_outcome(outcome(status="failed"), None, None) == outcome()
    assert ends.read() == [turn(), reward("finish"), outcome()]


async def test_a_session_is_found_by_what_its_calls_answered_and_by_its_first_request(ends: Ends) -> None:
    await ends.writer.open_session(spec(ttl_s=1e300))
    await ends.writer.append_turn(turn("first", reply_digest="d", request_digest="q"), 1e300, "me")
    child = turn("child", parent_id="first", relation="extends", request_digest="child")
    await ends.writer.append_turn(child, 1e300, "me")
    assert await ends.writer.find_continuations("me", ["other", "d", "q", "child"]) == [
        None,
        "s1",
        "s1",
        None,
    ]
    assert await ends.writer.find_continuations("you", ["d", "q"]) == [None, None]


async def test_the_first_turn_opens_a_session_that_is_not_there(ends: Ends) -> None:
    await ends.writer.append_turn(turn("t1"), 200.0, opening=spec(user="u"))
    await ends.writer.append_turn(turn("t2", finished_at=102.0), 200.0, opening=spec(user="u"))
    head = await ends.head()
    assert head.spec == spec(user="u")
    assert [each.turn_id for each in head.turns] == ["t1", "t2"]
    assert [each.position.session_id for each in await ends.writer.sessions(LIST_START, 10)] == ["s1"]
    await ends.writer.append_outcome(outcome(), None, None)
    with pytest.raises(SessionClosed, match="closed"):
        await ends.writer.append_turn(turn("t3"), 200.0, opening=spec(user="u"))


async def test_entries_stay_owed_until_they_are_acknowledged(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn("t1"), 200.0)
    await ends.writer.append_turn(turn("t2"), 200.0)
    first, second = ends.reader.read(10, 0.01)
    ends.reader.acknowledge([first.entry_id], NOTHING)
    assert list(ends.reader.reclaim()) == [second]
    assert ends.read() == []


async def test_verdicts_reach_the_head_and_count_once(ends: Ends) -> None:
    """If the answer to an acknowledgement is lost, the acknowledgement is repeated."""
    await ends.writer.open_session(spec())
    await ends.writer.append_turn(turn(), 200.0)
    (entry,) = ends.reader.read(10, 0.01)
    for _ in range(2):
        ends.reader.acknowledge([entry.entry_id], LEARNT)
    head = await ends.head()
    assert (head.verdict, head.turn_verdicts) == (TRAINED, {"t1": TRAINED})
    assert ends.counts() == {"session:trained": 1, "turn:trained": 1}


async def test_a_verdict_that_takes_the_place_of_another_is_counted_in_its_place(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    await ends.writer.append_outcome(outcome(status="failed"), None, Verdict(code="failed", detail="so"))
    ends.reader.acknowledge([], Verdicts({}, {("s1", "t1"): Verdict(code="stale")}))
    ends.reader.acknowledge([], LEARNT)
    assert ends.counts() == {"session:trained": 1, "turn:trained": 1}


async def test_a_number_is_kept_once_and_a_higher_one_after_it(ends: Ends) -> None:
    assert ends.reader.reserve(3, "file:///3") < 3
    assert [ends.reader.reserve(number, "file:///other") for number in (3, 2)] == [3, 3]
    assert ends.reader.reserve(5, "file:///5") == 3


async def test_a_session_past_its_deadline_expires_with_a_verdict(ends: Ends) -> None:
    for name, ttl_s in (("s1", 10.0), ("s2", 1000.0), ("called", 10.0)):
        await ends.writer.open_session(spec(name, ttl_s=ttl_s))
    await ends.writer.append_turn(turn(session_id="called"), expires_at=500.0)  # moves the deadline
    assert await ends.writer.expire(now=111.0, limit=10) == 1
    head = await ends.head("s1")
    assert head.verdict is not None
    assert head.verdict.code == "expired"
    assert [record.session_id for record in ends.read()] == ["called", "s1"]
    assert await ends.writer.expire(now=111.0, limit=10) == 0


async def test_a_session_that_waits_for_the_trainer_alone_does_not_expire(ends: Ends) -> None:
    for name, value in (("rewarded", reward("finish", "rewarded")), ("unrewarded", None)):
        await ends.writer.open_session(spec(name, ttl_s=10.0))
        await ends.writer.append_outcome(outcome(name), value, None)
    assert await ends.writer.expire(now=111.0, limit=10) == 1
    assert (await ends.head("rewarded")).verdict is None
    assert (await ends.head("unrewarded")).verdict is not None


async def test_a_call_sees_what_other_gateways_wrote(ends: Ends, redis_url: str) -> None:
    """Heads are cached between calls, and an outdated head is never used."""
    async with async_redis_at(redis_url) as redis:
        other = StreamWriter(redis) if isinstance(ends.writer, StreamWriter) else ends.writer
        both = (ends.writer, other)
        await ends.writer.open_session(spec())
        for number, writer in enumerate([ends.writer, other, other, ends.writer, other]):
            for reader in both:
                head = await reader.load_for_call("s1")
                assert head is not None
                assert head == await reader.load("s1")
            each = turn(f"t{number}", finished_at=101.0 + number)
            await writer.append_turn(each, 200.0)
            await writer.append_turn(each, 200.0)  # its answer was lost
        await other.append_outcome(outcome(), None, None)
        for reader in both:
            head = await reader.load_for_call("s1")
            assert head is not None
            assert (len(head.turns), head.state) == (5, "waiting_reward")
        assert await ends.writer.load_for_call("nobody") is None
        await other.close()


# Tests that need a real Redis


def test_acknowledged_entries_leave_the_stream_and_owed_ones_never(redis: Redis) -> None:
    reader = claimed_reader(redis)
    for index in range(5):
        redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(turn(f"t{index}"))})
    entries = reader.read(3, 0.01)
    reader.acknowledge([entries[0].entry_id, entries[2].entry_id], NOTHING)
    raw: Any = redis.xrange(key_names.STREAM)
    left = [entry_id.decode() for entry_id, _ in raw]
    assert left[:2] == [entries[1].entry_id, entries[2].entry_id]
    assert len(left) == 4


def test_a_record_nobody_can_read_is_set_aside_with_its_bytes(redis: Redis) -> None:
    reader = claimed_reader(redis)
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b"\x09nonsense"})
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(turn())})
    assert [entry.record for entry in reader.read(10, 0.01)] == [turn()]
    letters: Any = redis.xrange(key_names.DEAD_LETTERS)
    ((_, letter),) = letters
    assert letter[key_names.STREAM_FIELD] == b"\x09nonsense"
    assert b"schema 9" in letter[b"error"]
    assert len(list(reader.reclaim())) == 1


def test_a_second_reader_takes_up_what_the_first_left(redis: Redis) -> None:
    first = claimed_reader(redis)
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(turn())})
    first.read(10, 0.01)
    assert [entry.record for entry in claimed_reader(redis).reclaim()] == [turn()]


async def test_a_redis_that_is_gone_is_storage_unavailable(tmp_path: Path) -> None:
    nowhere = async_redis_at(f"unix://{tmp_path}/nobody")
    with pytest.raises(StorageUnavailable):
        await StreamWriter(nowhere).append_turn(turn(), 200.0)
    with pytest.raises(StorageUnavailable):
        await StreamWriter(nowhere).open_session(spec())


async def test_a_call_in_time_wins_over_a_gateway_that_saw_the_old_deadline(
    writer: StreamWriter, connection: AsyncRedis, redis: Redis
) -> None:
    await writer.open_session(spec(ttl_s=10.0))
    with pytest.MonkeyPatch.context() as patch:
        before_script(patch, connection, session_scripts.EXPIRE, lambda: writer.append_turn(turn(), 500.0))
        assert await writer.expire(now=111.0, limit=10) == 0
    assert redis.xlen(key_names.STREAM) == 1


async def test_a_full_redis_takes_a_record_whole_or_not_at_all(writer: StreamWriter, redis: Redis) -> None:
    """But sessions expire: an open session keeps memory from being freed until then."""
    await writer.open_session(spec(ttl_s=10.0))
    redis.config_set("maxmemory", 1)
    with pytest.raises(StorageUnavailable):
        await writer.append_turn(turn(), 200.0)
    with pytest.raises(StorageUnavailable):
        await writer.open_group([spec("a", group_id="g"), spec("b", group_id="g")])
    assert await writer.load("s1") == SessionHead(spec=spec(ttl_s=10.0))
    assert redis.xlen(key_names.STREAM) == 0
    assert redis.exists(key_names.group("g")) == 0
    assert await writer.expire(now=111.0, limit=10) == 1
    assert redis.xlen(key_names.STREAM) == 1
