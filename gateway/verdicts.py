"""What is to be said of a session or a turn right now: the stored verdict, or what it waits for."""

from rollout_queue.head import SessionHead
from rollout_queue.records import Turn, Verdict


def session_verdict(head: SessionHead, group_ended: int, group_size: int) -> Verdict:
    """The verdict that stands, else what the session waits for, in words."""
    if head.verdict is not None:
        return head.verdict
    if head.outcome is None:
        return Verdict(code="open", detail="the session is not finished")
    if not head.spec.train:
        return Verdict(code="not_for_training", detail="the session was opened with train: false")
    if head.reward is None:
        return Verdict(code="waiting_reward", detail="finished, and nobody has rewarded it yet")
    if group_ended < group_size:
        detail = f"{group_ended} of {group_size} sessions of group {head.spec.group_id} have ended"
        return Verdict(code="group_incomplete", detail=detail)
    return Verdict(code="ready", detail="waits for the trainer")


def turn_verdict(head: SessionHead, turn: Turn, session: Verdict) -> Verdict:
    """A turn's own verdict, else its session's."""
    own = head.turn_verdicts.get(turn.turn_id)
    if own is not None:
        return own
    if turn.finish == "abort":
        return Verdict(code="aborted", detail="the call ended before its answer did")
    return Verdict(code=session.code, detail=session.detail)
