"""Lists of sessions in both orders, of one group or user, and without their turns."""

from collections.abc import Callable
from typing import Any

import pytest

from rollout_queue.contract.codec import encode
from rollout_queue.contract.head import (
    ALL_SESSIONS,
    LIST_END,
    LIST_START,
    ListPosition,
    ListScope,
    SessionHead,
    TurnSums,
)
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import SessionSpec, Span, Turn
from rollout_queue.redis import key_names, session_lists
from tests.support.queue.ends import Ends
from tests.support.queue.records import outcome, reward, spec, turn

NEWEST = ListScope(newest_first=True)
SUMMARIES = ListScope(turns=False)


async def listed(ends: Ends, after: ListPosition, count: int, scope: ListScope) -> list[str]:
    page = await ends.writer.sessions(after, count, scope=scope)
    assert all(isinstance(each.found, SessionHead) for each in page)
    return [each.position.session_id for each in page]


def sampled(name: str, versions: tuple[Span, ...], finished_at: float) -> Turn:
    tokens = versions[-1].end if versions else 0
    output: dict[str, Any] = {"output_ids": TokenIds(range(tokens)), "logprobs": Logprobs([-1.0] * tokens)}
    return turn(name, versions=versions, finished_at=finished_at, **output)


async def test_sessions_are_listed_by_age_page_by_page(ends: Ends) -> None:
    for name, created_at in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=created_at))
    pages = [await ends.writer.sessions(LIST_START, 2)]
    while pages[-1]:
        pages.append(await ends.writer.sessions(pages[-1][-1].position, 2))
    assert [[each.position.session_id for each in page] for page in pages] == [["a", "b"], ["c"], []]


async def test_the_place_of_a_session_is_between_those_of_its_age(ends: Ends) -> None:
    """The bytes of the ids decide among sessions of one age, not the locale. A position without a session is
    valid, too."""
    names = ["B", "a", "a-", "a0", "b", "ab"]
    for name in names:
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=1.0))
    await ends.writer.open_session(SessionSpec(session_id="A", created_at=2.0))
    for behind, next_ones in (("a", ["a-", "a0"]), ("a/", ["a0", "ab"]), ("", ["B", "a"]), ("b", ["A"])):
        assert await listed(ends, ListPosition(1.0, behind), 2, ALL_SESSIONS) == next_ones


async def test_the_newest_session_comes_first_if_a_list_asks_for_that(ends: Ends) -> None:
    """The bytes of the ids decide among sessions of one age, as in the other order."""
    for name, created_at in (("b", 2.0), ("a", 1.0), ("a-", 2.0), ("c", 3.0), ("B", 2.0)):
        await ends.writer.open_session(SessionSpec(session_id=name, created_at=created_at))
    assert await listed(ends, LIST_END, 3, NEWEST) == ["c", "b", "a-"]
    assert await listed(ends, ListPosition(2.0, "a-"), 9, NEWEST) == ["B", "a"]
    assert await listed(ends, ListPosition(2.0, "a"), 1, NEWEST) == ["B"]
    assert await listed(ends, LIST_START, 9, NEWEST) == []


@pytest.mark.parametrize("most", [session_lists.MOST_MEMBERS, 1])
async def test_a_list_of_a_group_or_user_has_all_of_its_sessions(
    ends: Ends, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if there are too many of them to be read at once; then the list looks at other sessions, too."""
    monkeypatch.setattr(session_lists, "MOST_MEMBERS", most)
    for number in range(6):
        given: dict[str, Any] = {"group_id": "g" if number % 2 else None, "user": "u" if number > 2 else None}
        await ends.writer.open_session(
            SessionSpec(session_id=f"s{number}", created_at=float(number), **given)
        )

    async def of(scope: ListScope, *names: str) -> None:
        start, found = scope.start, []
        while page := await ends.writer.sessions(start, 2, _is_in(scope), scope):
            found += [each.position.session_id for each in page if each.found is not None]
            start = page[-1].position
        assert found == list(names)

    await of(ListScope(group_id="g"), "s1", "s3", "s5")
    await of(ListScope(newest_first=True, group_id="g"), "s5", "s3", "s1")
    await of(ListScope(user="u"), "s3", "s4", "s5")
    await of(ListScope(group_id="g", user="u"), "s3", "s5")
    await of(ListScope(group_id="none"))


def _is_in(scope: ListScope) -> Callable[[SessionSpec], bool]:
    def wanted(found: SessionSpec) -> bool:
        return scope.group_id in (None, found.group_id) and scope.user in (None, found.user)

    return wanted


async def test_a_summary_is_the_head_without_turns(ends: Ends) -> None:
    await ends.writer.open_session(spec())
    assert await sums(ends) == TurnSums()
    await ends.writer.append_turn(sampled("empty", (), 101.5), 200.0)
    assert await sums(ends) == TurnSums(1, 0, 101.5)
    await ends.writer.append_turn(sampled("two", (Span(9, 0, 1), Span(10, 1, 3)), 103.25), 200.0)
    await ends.writer.append_turn(sampled("one", (Span(8, 0, 4),), 102.0), 200.0)
    await ends.writer.append_turn(sampled("one", (Span(8, 0, 4),), 102.0), 200.0)
    assert await sums(ends) == TurnSums(3, 7, 103.25, 8, 10)
    await ends.writer.append_reward(reward())
    await ends.writer.append_outcome(outcome(), None, None)
    head, whole = await summary(ends), await ends.head()
    assert head.expires_at == whole.expires_at
    assert (head.reward, head.outcome, head.spec) == (whole.reward, whole.outcome, whole.spec)


@pytest.mark.parametrize("written", ["one turn", "all turns"])
async def test_turns_that_an_older_build_has_appended_are_in_the_summary(stream: Ends, written: str) -> None:
    await stream.writer.open_session(spec())
    await stream.writer.append_turn(sampled("new", (Span(1, 0, 1),), 101.0), 200.0)
    old = sampled("old", (Span(0, 0, 2),), 102.0)
    stream.redis.hset(key_names.session("s1"), "t:old", encode(old))
    if written == "all turns":
        stream.redis.hdel(key_names.session("s1"), "turns")
    assert await sums(stream) == TurnSums(2, 3, 102.0, 0, 1)


async def summary(ends: Ends) -> SessionHead:
    (each,) = await ends.writer.sessions(LIST_START, 2, scope=SUMMARIES)
    assert isinstance(each.found, SessionHead)
    return each.found


async def sums(ends: Ends) -> TurnSums:
    return (await summary(ends)).sums
