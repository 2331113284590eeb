"""A session's tree of turns: which of them may be trained, and the branches they lie on.

root ─ a ─ b          branches(…) ─▶ (root a b), (root c)
     └ c              b and c are the tips: nothing trainable continues them
"""

from collections.abc import Collection, Mapping, Sequence

from rollout_queue.contract.attempts import orphans_of
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.verdicts import exclusion

Branch = tuple[Turn, ...]
"""Turns from a root to a tip; each holds what it adds to the one before."""


def exclusions(turns: Sequence[Turn]) -> Mapping[str, Verdict]:
    """The turns that must not be trained, by id, and why."""
    orphans = orphans_of(turns)
    told = {turn.turn_id: exclusion(turn, orphans) for turn in turns}
    return {turn_id: verdict for turn_id, verdict in told.items() if verdict is not None}


def branches(turns: Sequence[Turn], trainable: Collection[str]) -> list[Branch]:
    """The branches that together hold every trainable turn, oldest tip first; none ends on another's way."""
    by_id = {turn.turn_id: turn for turn in turns}
    on_the_way: set[str] = set()
    for turn in turns:
        if turn.turn_id in trainable:
            on_the_way.update(ancestor.turn_id for ancestor in _branch(turn, by_id)[:-1])
    tips = [turn for turn in turns if turn.turn_id in trainable and turn.turn_id not in on_the_way]
    return [_branch(tip, by_id) for tip in sorted(tips, key=_age)]


def contradiction(turns: Sequence[Turn], vocab_size: int) -> str | None:
    """Why the tree cannot be trained as it is; None when it can."""
    by_id = {turn.turn_id: turn for turn in turns}
    for turn in turns:
        if turn.parent_id is not None and turn.parent_id not in by_id:
            return f"turn {turn.turn_id} continues turn {turn.parent_id}, which is not in the stream"
        if turn.parent_id is None and not turn.context_ids:
            return f"turn {turn.turn_id} has no prompt"
        largest = max([*turn.context_ids, *turn.output_ids], default=0)
        if largest >= vocab_size:
            return f"turn {turn.turn_id} has token id {largest} of a vocabulary of {vocab_size}"
        if _circular(turn, by_id):
            return f"turn {turn.turn_id} is its own ancestor"
    return None


def _branch(tip: Turn, by_id: Mapping[str, Turn]) -> Branch:
    branch = [tip]
    while branch[-1].parent_id is not None:
        branch.append(by_id[branch[-1].parent_id])
    return tuple(reversed(branch))


def _circular(turn: Turn, by_id: Mapping[str, Turn]) -> bool:
    seen: set[str] = set()
    ancestor: Turn | None = turn
    while ancestor is not None:
        if ancestor.turn_id in seen:
            return True
        seen.add(ancestor.turn_id)
        ancestor = by_id.get(ancestor.parent_id) if ancestor.parent_id is not None else None
    return False


def _age(turn: Turn) -> tuple[float, str]:
    """Sorts from the oldest; the id breaks ties, so that the order never depends on the stream's."""
    return (turn.started_at, turn.turn_id)
