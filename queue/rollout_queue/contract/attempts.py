"""Computes which turn a retry replaces, each time that a turn is appended to its session.

A retry R and the turn X that it replaces answer the same request; X began first. Two orders are possible:

X is recorded before R    R replaces X                                    R.retry_of = X
R is recorded before X    X is an orphan of R from the start              X.orphan_of = R
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollout_queue.contract.records import Turn


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
