"""Why tokens, turns and sessions were not trained: one sentence for people, from what is stored.

verdict ▸ detail ▸ rewards of the group ──▶ why a session or a turn is not trained
turn ▸ advantages of its tokens ─────────▶ spans of tokens that are not trained, each with its reason
"""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.sessions.verdicts import STEP, moment
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn, Verdict

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
