"""Verdicts that both the gateway and the trainer give, in the same words."""

from collections.abc import Mapping

from rollout_queue.contract.attempts import retraction_id
from rollout_queue.contract.records import Outcome, SessionSpec, Turn, Verdict
from rollout_queue.contract.sampling import inexact

OPENED_UNTRAINED = Verdict(
    code="not_for_training", detail="for evaluation: opened with train: false, or pinned to a version"
)

RETRACTED = Verdict(
    code="orphan_retry",
    detail="its client was told that the call failed: Redis stored the turn, but replied too late",
)

DELETED = Verdict(code="deleted", detail="the session was deleted, with everything in it")


def exclusion(turn: Turn, orphans: Mapping[str, str]) -> Verdict | None:
    """Why a turn must not be trained; None if it may be. `orphans` is what `orphans_of` returns."""
    if retry := orphans.get(turn.turn_id):
        if retry == retraction_id(turn.turn_id):
            return RETRACTED
        return Verdict(code="orphan_retry", detail=f"turn {retry} asked the same again")
    if turn.finish == "abort":
        return Verdict(code="aborted", detail="the call ended before its answer was complete")
    if turn.train and not turn.pinned:
        return None
    if turn.pinned:
        return OPENED_UNTRAINED
    reasons = [f"a {turn.side_call} that the agent's harness asked for"] if turn.side_call else []
    reasons += ["sampled under a constraint"] if "constraint" in turn.sampling.used else []
    if others := inexact(turn.sampling.used):
        reasons.append(f"sampled with {', '.join(others)}: its logprobs are of another distribution")
    return Verdict(code="not_for_training", detail=", ".join(reasons)) if reasons else OPENED_UNTRAINED


def expiry(spec: SessionSpec, now: float) -> tuple[Outcome, Verdict]:
    """The outcome and the verdict of a session that was not finished, or not rewarded, in time."""
    detail = f"no reward and finish within {spec.ttl_s:g} s of its last call"
    outcome = Outcome(
        session_id=spec.session_id,
        status="abandoned",
        reason="expired",
        created_at=now,
        group_id=spec.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        train=spec.train,
    )
    return outcome, Verdict(code="expired", detail=detail)
