"""Each verdict has a sentence that says why a session, a turn or a token was not trained."""

from pathlib import Path
from typing import Any, cast, get_args

import pytest

from gateway.sessions.session_service import SessionService
from gateway.sessions.verdicts import (
    CONTEXT,
    NO_ADVANTAGE,
    session_verdict,
    turn_verdict,
    untrained_spans,
    why_session,
    why_turn,
)
from gateway.settings import GatewaySettings
from rollout_queue.contract.head import GroupProgress, SessionHead
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import SessionSpec, Span, Verdict, VerdictCode
from tests.support.queue.memory_stream import MemoryStream
from tests.support.queue.records import outcome, reward, spec, turn

STORED = {
    "group_incomplete": "It came after its group had been decided: because.",
    "stale": "The weights had changed too much since it was sampled: because.",
    "skipped_for_newer": "The trainer took newer sessions instead: because.",
    "too_long": "It is too long for the trainer: because.",
    "truncated": "Its session was cut off, and this deployment does not train those: because.",
    "failed": "Its session failed, so its reward would say nothing of the model: because.",
    "abandoned": "Its session was abandoned: because.",
    "expired": "Its session expired: because.",
    "orphan_retry": "A retry has replaced it: because.",
    "aborted": "Its answer is not whole: because.",
    "not_for_training": "It is not meant for training: because.",
    "invalid": "The trainer refused it: because.",
    "deleted": "Its session was deleted.",
}
"""The sentences of verdicts that are stored, for the detail `because`."""
OTHERS = {"open", "waiting_reward", "ready", "trained", "zero_advantage"}


def head(of: SessionSpec | None = None, **fields: object) -> SessionHead:
    return SessionHead(spec=of or spec(), turns=(turn(),), **fields)  # type: ignore[arg-type]


def test_every_verdict_has_a_test_here() -> None:
    assert STORED.keys() | OTHERS == set(get_args(VerdictCode))


@pytest.mark.parametrize("code", STORED)
def test_a_stored_verdict_tells_its_detail(code: VerdictCode) -> None:
    verdict = Verdict(code=code, detail="because")
    of = head(outcome=outcome(), verdict=verdict)
    assert why_session(of, verdict) == STORED[code]
    assert why_turn(of, of.turns[0], turn_verdict(of, of.turns[0], verdict), STORED[code]) == STORED[code]


def test_an_open_session_says_when_it_expires() -> None:
    of = head()
    why = why_session(of, session_verdict(of, None))
    assert why is not None
    assert "still open" in why
    assert "1970-01-01T01:01:41+00:00" in why


def test_a_session_without_a_reward_says_until_when_it_waits() -> None:
    of = head(outcome=outcome())
    expected = "Its session is finished and waits for a reward until 1970-01-01T01:01:41+00:00."
    assert why_session(of, session_verdict(of, None)) == expected


def test_a_session_waits_for_its_group_and_then_for_the_trainer() -> None:
    of = head(spec(group_id="g"), outcome=outcome(), rewards=(reward(),))
    waits = why_session(of, session_verdict(of, GroupProgress(4, 1, 2, 1)))
    assert waits == (
        "Its group is not complete: 1 of 4 sessions of group g have ended; 2 go on, 1 waits for a reward."
    )
    ready = why_session(of, session_verdict(of, GroupProgress(4, 4)))
    assert ready == "Its session is rewarded and its group complete: it waits for a step of the trainer."


@pytest.mark.parametrize(
    ("of", "group", "expected"),
    [
        (head(outcome=outcome(), rewards=(reward(),)), None, "compared with no other session, so by default"),
        (head(outcome=outcome(), rewards=(reward(),)), GroupProgress(1, 1), "compared with no other session"),
        (
            SessionHead(spec=spec(group_id="g"), outcome=outcome(), rewards=(reward(),)),
            GroupProgress(4, 4),
            "the model was never called in it",
        ),
    ],
    ids=["no group", "a group of one", "no call"],
)
def test_a_session_that_no_step_trains_is_not_promised_one(
    of: SessionHead, group: GroupProgress | None, expected: str
) -> None:
    verdict = session_verdict(of, group)
    for told in (verdict.detail or "", why_session(of, verdict) or ""):
        assert expected in told
        assert "waits for a step" not in told


@pytest.mark.parametrize(
    ("group_id", "rewards", "expected"),
    [
        ("g", (0.5, 0.5, 0.5, 0.5), "All 4 rewards of its group are 0.5, so its advantage is 0."),
        ("g", (1.0,), "No other session of its group"),
        ("g", (1.0, 0.5), "Its advantage is 0: because."),
        ("g", (), "Its advantage is 0: because."),
        (None, (), "has no group"),
    ],
)
def test_no_advantage_is_explained_by_the_rewards(
    group_id: str | None, rewards: tuple[float, ...], expected: str
) -> None:
    verdict = Verdict(code="zero_advantage", detail="because")
    why = why_session(head(spec(group_id=group_id), verdict=verdict), verdict, rewards)
    assert why is not None
    assert expected in why


async def test_the_rewards_of_a_group_are_read_where_they_explain_that_there_is_no_advantage(
    tmp_path: Path,
) -> None:
    stream = MemoryStream()
    for name, group_id, value in (("a", "g", 0.5), ("b", "g", 0.5), ("c", "other", 1.0)):
        await stream.open_session(spec(name, group_id=group_id))
        await stream.append_reward(reward(session_id=name, value=value))
    nobody = cast(Any, None)
    sessions = SessionService(GatewaySettings(model_path=tmp_path), stream, nobody, nobody)
    none, stale = Verdict(code="zero_advantage", detail="because"), Verdict(code="stale", detail="because")
    member, single = head(spec("a", group_id="g")), head()
    cases = ((member, none), (member, stale), (single, none))
    assert [await sessions.group_rewards(*case) for case in cases] == [[0.5, 0.5], [], []]


def test_a_turn_has_the_reason_of_its_session_unless_it_has_a_verdict_of_its_own() -> None:
    verdict = Verdict(code="zero_advantage", detail="all 2 rewards of the group are 1")
    of = head(spec(group_id="g"), verdict=verdict, turn_verdicts={"t1": verdict})
    session = why_session(of, verdict, [1.0, 1.0])
    assert session == "All 2 rewards of its group are 1, so its advantage is 0."
    assert why_turn(of, of.turns[0], verdict, session) == session
    own = Verdict(code="zero_advantage", detail="its return is that of all other turns")
    of = head(spec(group_id="g"), verdict=verdict, turn_verdicts={"t1": own})
    why = "Its advantage is 0: its return is that of all other turns."
    assert why_turn(of, of.turns[0], own, session) == why


def test_a_trained_turn_needs_no_reason_and_its_context_has_one() -> None:
    verdict = Verdict(code="trained", step=1, version=2)
    of = head(verdict=verdict, turn_verdicts={"t1": verdict})
    assert why_session(of, verdict) is None
    assert why_turn(of, of.turns[0], verdict, None) is None
    assert untrained_spans(of.turns[0], None, None) == [(0, 3, CONTEXT)]
    assert untrained_spans(of.turns[0], None, [0.5, -0.5]) == [(0, 3, CONTEXT)]
    assert untrained_spans(of.turns[0], "why", None) == [(0, 3, CONTEXT), (3, 5, "why")]


def test_tokens_without_advantage_are_joined_to_spans() -> None:
    long = turn(output_ids=TokenIds(range(5)), logprobs=Logprobs([0.0] * 5), versions=(Span(0, 0, 5),))
    found = untrained_spans(long, None, [0.0, 0.0, 1.0, 0.0, 2.0])
    assert found == [(0, 3, CONTEXT), (3, 5, NO_ADVANTAGE), (6, 7, NO_ADVANTAGE)]


def test_a_turn_of_a_trained_session_has_its_own_reason() -> None:
    trained = Verdict(code="trained", step=1, version=2)
    cut = turn("cut", finish="abort")
    of = SessionHead(spec=spec(), turns=(turn(), cut), verdict=trained)
    why = why_turn(of, cut, turn_verdict(of, cut, trained), None)
    assert why == "Its answer is not whole: the call ended before its answer was complete."
