"""The verdict of a session or a turn; while none is stored, what the session waits for, in words."""

from datetime import UTC, datetime

import msgspec

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.progress import GroupProgress
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.verdicts import OPENED_UNTRAINED, exclusion

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
