"""Finds the turns of a session that must not be trained, and the branches that contain the others.

root ─ a ─ b          branches(…) ─▶ (root a b), (root c)
     └ c              b and c are the tips: no trainable turn continues them
"""

from collections.abc import Collection, Mapping, Sequence

from rollout_queue.contract.attempts import orphans_of
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.verdicts import exclusion
from trainer_service.rows.images import ImageRule

Branch = tuple[Turn, ...]
"""The turns from a root to a tip. Each turn has only the tokens that it adds to its parent."""


def exclusions(turns: Sequence[Turn]) -> Mapping[str, Verdict]:
    """The verdicts of the turns that must not be trained, by turn id."""
    orphans = orphans_of(turns)
    found = {turn.turn_id: exclusion(turn, orphans) for turn in turns}
    return {turn_id: verdict for turn_id, verdict in found.items() if verdict is not None}


def branches(turns: Sequence[Turn], trainable: Collection[str]) -> list[Branch]:
    """The branches that together contain every turn of `trainable` (turn ids), sorted by the age of their
    tips, oldest first. No branch is a part of another."""
    by_id = {turn.turn_id: turn for turn in turns}
    inner: set[str] = set()
    for turn in turns:
        if turn.turn_id in trainable:
            inner.update(ancestor.turn_id for ancestor in _branch(turn, by_id)[:-1])
    tips = [turn for turn in turns if turn.turn_id in trainable and turn.turn_id not in inner]
    return [_branch(tip, by_id) for tip in sorted(tips, key=_age)]


def contradiction(turns: Sequence[Turn], vocab_size: int, images: ImageRule | None = None) -> str | None:
    """The reason why the tree of turns cannot be trained; None if it can. Without a rule of `images`, turns
    that show images cannot."""
    by_id = {turn.turn_id: turn for turn in turns}
    for turn in turns:
        if turn.parent_id is not None and turn.parent_id not in by_id:
            return f"turn {turn.turn_id} continues turn {turn.parent_id}, which is not in the stream"
        if images is None and turn.images:
            return f"turn {turn.turn_id} shows images, which this trainer does not train"
        if images is not None and (broken := images.complaint(turn)):
            return broken
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
    """A sort key, oldest first. The id breaks ties, so that equal times always give the same order."""
    return (turn.started_at, turn.turn_id)
