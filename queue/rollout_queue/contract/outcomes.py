"""How a session comes out: the sum of its rewards, which turn a retry replaced, and the verdicts that both
the gateway and the trainer give, in the same words.

A retry R and the turn X that it replaces answer the same request; X began first. Two orders are possible:

X is recorded before R    R replaces X                                    R.retry_of = X
R is recorded before X    X is an orphan of R from the start              X.orphan_of = R
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollout_queue.contract.errors import MOST_REWARDS, RewardsTooLarge, TooManyRewards
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Turn, Verdict, inexact

LARGEST_REWARD = 1e9
"""The magnitudes of a session's rewards may add up to this. Far larger rewards make gradients overflow; a
restarted trainer would read them again and fail again."""
LARGEST_FLOAT = 1.7e308


def total(rewards: Iterable[Reward]) -> float | None:
    """The sum of the rewards; None if there is none.

    Rewards that older builds stored may have an infinite sum. JSON has no infinity, so the result is at most
    LARGEST_FLOAT in magnitude.
    """
    values = [reward.value for reward in rewards]
    return max(-LARGEST_FLOAT, min(LARGEST_FLOAT, sum(values))) if values else None


def check_rewards(rewards: Iterable[Reward]) -> None:
    """Raises TooManyRewards for more than a session may have, and RewardsTooLarge if their magnitudes add up
    to more than LARGEST_REWARD."""
    rewards = list(rewards)
    if len(rewards) > MOST_REWARDS:
        raise TooManyRewards(rewards[0].session_id)
    if rewards and sum(abs(reward.value) for reward in rewards) > LARGEST_REWARD:
        raise RewardsTooLarge(rewards[0].session_id)


def orphans_of(turns: Iterable[Turn]) -> Mapping[str, str]:
    """Maps the id of each turn that a retry has replaced to the id of that retry. Orphans are not trained."""
    replaced: dict[str, str] = {}
    for turn in turns:
        if turn.retry_of is not None:
            replaced[turn.retry_of] = turn.turn_id
        if turn.orphan_of is not None:
            replaced[turn.turn_id] = turn.orphan_of
    return replaced


def retraction_id(turn_id: str) -> str:
    """The id of the turn that retracts `turn_id`, whose client was told that the call failed."""
    return f"{turn_id}-retracted"


def related(turn: Turn, recorded: Sequence[Turn]) -> Turn:
    """`turn` with its relation to the `recorded` turns of its session, in `retry_of` and `orphan_of`."""
    same = [other for other in recorded if other.request == turn.request] if turn.request_digest else []
    if not same:
        return turn
    orphans = orphans_of(same)
    continued = {other.parent_id for other in recorded}
    if earlier := _earlier(turn, same, orphans, continued):
        turn = msgspec.structs.replace(
            turn,
            relation="retry",
            reason="retried",
            retry_of=None if earlier.turn_id in continued else earlier.turn_id,
        )
    if later := _later(turn, same, orphans):
        turn = msgspec.structs.replace(turn, orphan_of=later.turn_id)
    return turn


def _comes_after(later: Turn, turn: Turn) -> bool:
    """Whether `later` answers later attempts than `turn` does, and the last of these attempts began later.

    A turn answers all attempts from `attempt` to `last_attempt`, because a retry may join a running call. The
    attempts of `turn` lie before those of `later`, or strictly between the first and the last of `later`.
    """
    before = turn.last_attempt < later.attempt
    between = later.attempt < turn.attempt and turn.last_attempt < later.last_attempt
    return (before or between) and turn.asked_at < later.asked_at


def _earlier(
    turn: Turn, same: Sequence[Turn], orphans: Mapping[str, str], continued: set[str | None]
) -> Turn | None:
    """The earlier attempt that the turn replaces: preferably one that no other turn continues; among those
    an aborted one; among those the last."""
    before = [other for other in same if _comes_after(turn, other) and other.turn_id not in orphans]
    return max(
        before,
        key=lambda other: (other.turn_id not in continued, other.finish == "abort", other.asked_at),
        default=None,
    )


def _later(turn: Turn, same: Sequence[Turn], orphans: Mapping[str, str]) -> Turn | None:
    """The first retry that began after `turn` and has replaced no other turn of `turn`'s attempt."""
    attempts = {other.turn_id: other.attempt for other in same}
    busy = {retry for orphan, retry in orphans.items() if attempts[orphan] == turn.attempt}
    after = [other for other in same if _comes_after(other, turn) and other.turn_id not in busy]
    return min(after, key=lambda other: other.asked_at, default=None)


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
