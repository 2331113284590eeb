"""Which turn a retry replaces, computed from the turns that are recorded when another one is appended.

X, then R    R is a retry: it replaces the last X of the same request that began before it     R.retry_of = X
R, then X    X began first and is recorded last, by another gateway: R has replaced it         X.orphan_of = R
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollout_queue.contract.records import Turn


def orphans_of(turns: Iterable[Turn]) -> Mapping[str, str]:
    """The turns that a retry has replaced, by id, with the id of that retry. None of them is trained."""
    replaced: dict[str, str] = {}
    for turn in turns:
        if turn.retry_of is not None:
            replaced[turn.retry_of] = turn.turn_id
        if turn.orphan_of is not None:
            replaced[turn.turn_id] = turn.orphan_of
    return replaced


def related(turn: Turn, recorded: Sequence[Turn]) -> Turn:
    """The turn with the id of the attempt that it replaces, or of the one that has replaced it."""
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
    """Whether `later` answers a later attempt than `turn` does.

    The attempts of `turn` lie before those of `later`, or between the first and the last of those.
    """
    before = turn.last_attempt < later.attempt
    between = later.attempt < turn.attempt and turn.last_attempt < later.last_attempt
    return (before or between) and turn.asked_at < later.asked_at


def _earlier(
    turn: Turn, same: Sequence[Turn], orphans: Mapping[str, str], continued: set[str | None]
) -> Turn | None:
    """The attempt that the turn replaces: turns that nothing continues come first, then aborted ones, then
    the last one."""
    before = [other for other in same if _comes_after(turn, other) and other.turn_id not in orphans]
    return max(
        before,
        key=lambda other: (other.turn_id not in continued, other.finish == "abort", other.asked_at),
        default=None,
    )


def _later(turn: Turn, same: Sequence[Turn], orphans: Mapping[str, str]) -> Turn | None:
    """The first retry that began after this turn and has replaced no other turn of the same attempt."""
    attempts = {other.turn_id: other.attempt for other in same}
    busy = {retry for orphan, retry in orphans.items() if attempts[orphan] == turn.attempt}
    after = [other for other in same if _comes_after(other, turn) and other.turn_id not in busy]
    return min(after, key=lambda other: other.asked_at, default=None)
