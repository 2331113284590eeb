"""A session that a call has opened gets its group later, once, whatever else happens to it at that moment."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout_queue.contract.errors import Conflict, StorageUnavailable
from rollout_queue.contract.records import LateJoin, SessionSpec
from rollout_queue.redis import key_names, session_deletion, session_scripts, turn_store
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.ends import Ends
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_faults import before_script, break_script

GROUP: dict[str, Any] = {"group_id": "g", "group_size": 2, "task_id": "k"}


async def called(ends: Ends, session_id: str = "s1", **fields: Any) -> None:
    """A call has opened the session, and has its answer."""
    await ends.writer.open_session(spec(session_id, implicit=True, **fields))
    await ends.writer.append_turn(turn(f"{session_id}-t", session_id), 3701.0)


async def test_a_session_gets_its_group_once(ends: Ends) -> None:
    await called(ends)
    asked = spec(**GROUP, metadata={"a": 1}, user="ann")
    assert await ends.writer.describe_session(asked, 110.0) == asked
    assert await ends.writer.describe_session(spec(group_id="other"), 111.0) == asked
    head = await ends.head()
    assert (head.spec, len(head.turns), head.expires_at) == (asked, 1, 110.0 + 3600.0)
    assert (await ends.writer.group_progress("g")).open == 1
    assert (await ends.writer.group_progress("other")).size == 0
    joined = LateJoin(session_id="s1", created_at=110.0, group_id="g", group_size=2)
    assert ends.read() == [turn("s1-t"), joined]


async def test_a_session_without_a_group_is_described_once_too(ends: Ends) -> None:
    await called(ends)
    assert await ends.writer.describe_session(spec(), 110.0) == spec()
    assert await ends.writer.describe_session(spec(**GROUP), 111.0) == spec()
    assert ends.read() == [turn("s1-t")]


async def test_only_an_open_session_that_a_call_has_opened_is_described(ends: Ends) -> None:
    assert await ends.writer.describe_session(spec(**GROUP), 110.0) is None
    await ends.writer.open_session(spec("explicit"))
    await called(ends, "finished")
    await ends.writer.append_outcome(outcome("finished"), None, None)
    await called(ends, "overdue")
    for name, now in (("explicit", 110.0), ("finished", 110.0), ("overdue", 3701.0)):
        kept = await ends.writer.describe_session(spec(name, **GROUP), now)
        assert kept == spec(name, implicit=name != "explicit")
    assert (await ends.writer.group_progress("g")).size == 0


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"group_id": "full"}, "has its 1 sessions already"),
        ({"group_id": "full", "group_size": 4}, "has size 1"),
        ({"group_id": "theirs"}, "another client key"),
    ],
)
async def test_a_group_that_refuses_the_session_changes_nothing(
    ends: Ends, asked: dict[str, Any], why: str
) -> None:
    await ends.writer.open_session(spec("a", group_id="full", group_size=1))
    await ends.writer.open_session(spec("b", group_id="theirs", owner="them"))
    await called(ends)
    before = await ends.writer.load("s1")
    with pytest.raises(Conflict, match=why):
        await ends.writer.describe_session(spec(**asked), 110.0)
    assert await ends.writer.load("s1") == before
    assert ends.read() == [turn("s1-t")]
    assert await ends.writer.describe_session(spec(**GROUP), 111.0) == spec(**GROUP)


async def test_an_end_that_was_made_before_says_the_group_all_the_same(ends: Ends) -> None:
    await called(ends)
    await ends.writer.describe_session(spec(**GROUP, train=False), 110.0)
    told = outcome(**GROUP, train=False)
    assert await ends.writer.append_outcome(outcome(), reward("finish"), None) == told
    assert await ends.writer.append_outcome(outcome(), None, None) == told
    assert ends.read()[-2:] == [reward("finish"), told]


async def test_an_expired_session_says_its_group(ends: Ends) -> None:
    await called(ends)
    await ends.writer.describe_session(spec(**GROUP), 110.0)
    assert await ends.writer.expire(now=3711.0, limit=10) == 1
    assert ends.read()[-1].group_id == "g"


async def test_a_longer_time_to_live_holds_for_a_call_that_was_under_way(ends: Ends) -> None:
    await called(ends)
    await ends.writer.describe_session(spec(ttl_s=9000.0), 110.0)
    await ends.writer.append_turn(turn("t2", finished_at=200.0), 200.0 + 3600.0, "owner")
    assert await ends.writer.expire(now=9199.0, limit=10) == 0
    assert await ends.writer.expire(now=9201.0, limit=10) == 1


async def test_a_shorter_time_to_live_ends_no_session_under_a_call(ends: Ends) -> None:
    """The gateway that serves the call puts off the deadline that it knows."""
    await called(ends)
    await ends.writer.describe_session(spec(ttl_s=5.0), 110.0)
    await ends.writer.append_turn(turn("t2", finished_at=200.0), 200.0 + 3600.0)
    head = await ends.head()
    assert head.expires_at == 3701.0
    assert await ends.writer.expire(now=3700.0, limit=10) == 0
    await ends.writer.append_turn(turn("t3", finished_at=3700.0), 3700.0 + 3600.0)
    assert await ends.writer.expire(now=3704.0, limit=10) == 0
    assert await ends.writer.expire(now=3706.0, limit=10) == 1


async def test_another_gateway_sees_the_group_at_its_next_call(ends: Ends, redis_url: str) -> None:
    async with async_redis_at(redis_url) as redis:
        other = StreamWriter(redis)
        await called(ends)
        for writer in (ends.writer, other):
            assert await writer.load_for_call("s1") == await writer.load("s1")
        await ends.writer.describe_session(spec(**GROUP), 110.0)
        for writer in (ends.writer, other):
            head = await writer.load_for_call("s1")
            assert head is not None
            assert (head.spec.group_id, len(head.turns)) == ("g", 1)
        await other.close()


def describing(stream: Ends, asked: SessionSpec) -> Callable[[], Awaitable[object]]:
    return lambda: stream.writer.describe_session(asked, 110.0)


async def described_late(stream: Ends, happens: Callable[[], Awaitable[object]]) -> SessionSpec | None:
    """Describe a session. `happens` comes before the script, after the session was looked at."""
    await stream.writer.open_session(spec(implicit=True))
    with pytest.MonkeyPatch.context() as patch:
        before_script(patch, stream.client, session_scripts.DESCRIBE, happens)
        return await stream.writer.describe_session(spec(**GROUP), 110.0)


async def test_of_two_descriptions_at_once_one_is_stored(stream: Ends) -> None:
    first = spec(group_id="first")
    assert await described_late(stream, describing(stream, first)) == first
    assert (await stream.writer.group_progress("g")).size == 0


async def test_a_turn_that_comes_between_stays(stream: Ends) -> None:
    stored = await described_late(stream, lambda: stream.writer.append_turn(turn(), 3701.0))
    assert stored == spec(**GROUP)
    head = await stream.called()
    assert (head.spec, head.turns) == (spec(**GROUP), (turn(),))


async def test_an_end_or_a_deletion_that_comes_between_wins(stream: Ends) -> None:
    ended = await described_late(stream, lambda: stream.writer.append_outcome(outcome(), None, None))
    assert ended == spec(implicit=True)
    assert not stream.redis.exists(key_names.group("g"), key_names.group_members("g"))
    stream.redis.flushdb()
    assert await described_late(stream, lambda: stream.deleted("s1")) is None
    assert not stream.redis.exists(key_names.group("g"), key_names.group_members("g"))


async def test_a_description_that_comes_before_an_end_is_in_it(stream: Ends) -> None:
    await stream.writer.open_session(spec(implicit=True))
    with pytest.MonkeyPatch.context() as patch:
        described = describing(stream, spec(**GROUP))
        before_script(patch, stream.client, turn_store.APPEND_OUTCOME, described)
        assert (await stream.writer.append_outcome(outcome(), None, None)).group_id == "g"


async def test_the_trainer_hears_the_group_of_a_session_that_was_deleted_meanwhile(stream: Ends) -> None:
    await called(stream)
    with pytest.MonkeyPatch.context() as patch:
        described = describing(stream, spec(**GROUP))
        before_script(patch, stream.client, session_deletion.DELETE, described)
        await stream.deleted("s1")
    (record,) = stream.records()
    assert b"deletion" in record
    assert b"group_id\xa1g" in record


async def test_a_gateway_that_dies_before_the_script_has_changed_nothing(stream: Ends) -> None:
    await stream.writer.open_session(spec(implicit=True))
    with pytest.MonkeyPatch.context() as patch:
        break_script(patch, stream.client, session_scripts.DESCRIBE)
        with pytest.raises(StorageUnavailable):
            await stream.writer.describe_session(spec(**GROUP, user="ann"), 110.0)
    assert not stream.redis.exists(
        key_names.group("g"), key_names.group_members("g"), key_names.user_sessions("ann")
    )
    assert not stream.records()
    assert await stream.writer.describe_session(spec(**GROUP, user="ann"), 110.0) == spec(**GROUP, user="ann")
    assert stream.redis.smembers(key_names.user_sessions("ann")) == {b"s1"}


async def test_a_full_redis_describes_a_session_whole_or_not_at_all(stream: Ends) -> None:
    await stream.writer.open_session(spec(implicit=True))
    before = stream.redis.hgetall(key_names.session("s1"))
    stream.redis.config_set("maxmemory", 1)
    with pytest.raises(StorageUnavailable):
        await stream.writer.describe_session(spec(**GROUP), 110.0)
    assert stream.redis.hgetall(key_names.session("s1")) == before
    assert not stream.redis.exists(key_names.group("g"))
    assert not stream.records()


async def test_what_is_trained_counts_and_nothing_else(stream: Ends) -> None:
    for name in ("counted", "evaluation", "uncounted"):
        await stream.writer.open_session(spec(name, implicit=True))
    stream.redis.zadd(key_names.UNTRAINED, {"evaluation": 100.0})
    await stream.writer.describe_session(spec("counted"), 110.0, counts=True)
    await stream.writer.describe_session(spec("evaluation", train=False), 110.0)
    await stream.writer.describe_session(spec("uncounted"), 110.0)
    assert stream.redis.zrange(key_names.UNTRAINED, 0, -1) == [b"counted"]
