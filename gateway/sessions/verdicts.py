"""The verdict of a session or a turn; while none is stored, what the session waits for, in words.

verdict ▸ detail ▸ rewards of the group ──▶ why a session or a turn is not trained, in one sentence
turn ▸ advantages of its tokens ─────────▶ spans of tokens that are not trained, each with its reason
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from rollout_queue.contract.head import GroupProgress, SessionHead
from rollout_queue.contract.outcomes import OPENED_UNTRAINED, exclusion
from rollout_queue.contract.records import Turn, Verdict

STEP = "waits for a step of the trainer"


def waits_for_group(head: SessionHead) -> bool:
    """Whether the verdict depends on the other sessions of the group."""
    ended = head.verdict is None and head.outcome is not None
    return ended and head.spec.train and head.reward is not None


def session_verdict(head: SessionHead, group: GroupProgress | None) -> Verdict:
    """The stored verdict, else what the session waits for; `group` is the state of its group, if any."""
    if head.verdict is not None:
        return _with_detail(head.verdict)
    if head.outcome is None:
        return Verdict(code="open", detail="the session is not finished")
    if not head.spec.train:
        return OPENED_UNTRAINED
    if head.reward is None:
        detail = (
            f"finished, and nobody has rewarded it yet: POST /sessions/{head.spec.session_id}/reward, before "
            f"it expires at {moment(head.expires_at)}"
        )
        return Verdict(code="waiting_reward", detail=detail)
    if group is not None and group.waiting_for:
        detail = f"{group.ended} of {group.size} sessions of group {head.spec.shown_group} have ended"
        return Verdict(code="group_incomplete", detail=f"{detail}; {group.waiting_for}")
    return Verdict(code="ready", detail=f"finished and rewarded{_outlook(head, group)}")


def _outlook(head: SessionHead, group: GroupProgress | None) -> str:
    """What will become of a session that is finished and rewarded, as far as it is known here."""
    if head.sums.turns == 0:
        return ", but the model was never called in it, so there is nothing to train"
    if group is None or group.size == 1:
        return (
            ", but it is compared with no other session, so by default no step trains it: open the attempts "
            "at one task as a group (POST /groups)"
        )
    return f", and so are all {group.size} of its group: {STEP}"


def turn_verdict(head: SessionHead, turn: Turn, session: Verdict) -> Verdict:
    """A turn's own verdict, else its session's."""
    own = head.turn_verdicts.get(turn.turn_id)
    if own is not None:
        return _with_detail(own)
    excluded = exclusion(turn, head.orphans)
    if excluded is not None and (head.spec.train or excluded.code != "not_for_training"):
        return excluded
    return Verdict(code=session.code, detail=session.detail)


def _with_detail(verdict: Verdict) -> Verdict:
    """The verdict with a `detail`. If it was stored without one, a standard text is added."""
    if verdict.detail:
        return verdict
    detail = f"ended as {verdict.code}; no reason was given"
    if verdict.code == "trained":
        detail = f"trained in step {verdict.step}, which made version {verdict.version}"
    return msgspec.structs.replace(verdict, detail=detail)


def moment(at: float) -> str:
    """A moment in ISO 8601: UTC, to the second."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError):  # beyond the year 9999
        return "the end of time"


CONTEXT = "It is context: the agent or the chat template wrote it, the model did not sample it."
EMPTY_ROOT = "The turn has no output: the model sampled no token."
NO_ADVANTAGE = "Its advantage is 0: it was part of the step, and pushed the weights in no direction."


class UntrainedSpan(NamedTuple):
    """Tokens [start, end) of a turn, counted from the first token of its context, and why they are not
    trained."""

    start: int
    end: int
    why: str


def why_session(head: SessionHead, verdict: Verdict, rewards: Sequence[float] = ()) -> str | None:
    """Why the session is not trained, or not yet; None if it is. `rewards` are those of its group, the
    session's own included, as far as they are known."""
    if verdict.code == "trained":
        return None
    if verdict.code == "zero_advantage":
        return _no_advantage(head, verdict, rewards)
    return _sentence(head, verdict)


def why_turn(head: SessionHead, turn: Turn, verdict: Verdict, session: str | None) -> str | None:
    """Why the turn is not trained; None if it is. `verdict` is the turn's, `session` what `why_session`
    says."""
    if verdict.code == "trained":
        return None if turn.output_ids else EMPTY_ROOT
    own, whole = head.turn_verdicts.get(turn.turn_id), head.verdict
    shared = own is None or (whole is not None and (own.code, own.detail) == (whole.code, whole.detail))
    if shared and session is not None and verdict.code not in ("orphan_retry", "aborted", "not_for_training"):
        return session
    return _sentence(head, verdict)


def untrained_spans(turn: Turn, why: str | None, advantages: Sequence[float] | None) -> list[UntrainedSpan]:
    """The tokens of the turn that changed no weight. `why` is what `why_turn` says, `advantages` those of the
    output tokens if they are recorded."""
    first, last = len(turn.context_ids), len(turn.context_ids) + len(turn.output_ids)
    spans = [UntrainedSpan(0, first, CONTEXT)] if first else []
    if why is not None:
        return [*spans, UntrainedSpan(first, last, why)] if last > first else spans
    for at, advantage in enumerate(advantages or ()):
        if advantage != 0:
            continue
        before = spans[-1] if spans else None
        if before is not None and before.why == NO_ADVANTAGE and before.end == first + at:
            spans[-1] = before._replace(end=before.end + 1)
        else:
            spans.append(UntrainedSpan(first + at, first + at + 1, NO_ADVANTAGE))
    return spans


def _sentence(head: SessionHead, verdict: Verdict) -> str:
    detail = verdict.detail
    match verdict.code:
        case "open":
            return (
                "Its session is still open: it is trained once it is finished, rewarded and compared. It "
                f"expires at {moment(head.expires_at)} if no call comes."
            )
        case "waiting_reward":
            return f"Its session is finished and waits for a reward until {moment(head.expires_at)}."
        case "group_incomplete" if head.verdict is None:
            return f"Its group is not complete: {detail}."
        case "group_incomplete":
            return f"It came after its group had been decided: {detail}."
        case "ready":
            return _ready(detail)
        case "stale":
            return f"The weights had changed too much since it was sampled: {detail}."
        case "skipped_for_newer":
            return f"The trainer took newer sessions instead: {detail}."
        case "too_long":
            return f"It is too long for the trainer: {detail}."
        case "truncated":
            return f"Its session was cut off, and this deployment does not train those: {detail}."
        case "failed":
            return f"Its session failed, so its reward would say nothing of the model: {detail}."
        case "abandoned":
            return f"Its session was abandoned: {detail}."
        case "expired":
            return f"Its session expired: {detail}."
        case "zero_advantage":
            return f"Its advantage is 0: {detail}."
        case "orphan_retry":
            return f"A retry has replaced it: {detail}."
        case "aborted":
            return f"Its answer is not whole: {detail}."
        case "not_for_training":
            return f"It is not meant for training: {detail}."
        case "invalid":
            return f"The trainer refused it: {detail}."
        case "deleted":
            return "Its session was deleted."
        case _:
            return detail


def _ready(detail: str) -> str:
    if detail.endswith(STEP):
        return f"Its session is rewarded and its group complete: it {STEP}."
    return f"It is {detail}."


def _no_advantage(head: SessionHead, verdict: Verdict, rewards: Sequence[float]) -> str:
    if head.spec.group_id is None:
        return "Its session has no group, so its reward can be compared with no other: its advantage is 0."
    if len(rewards) == 1:
        return "No other session of its group has a reward to compare it with, so its advantage is 0."
    if len(rewards) > 1 and len(set(rewards)) == 1:
        return f"All {len(rewards)} rewards of its group are {rewards[0]:g}, so its advantage is 0."
    return _sentence(head, verdict)
