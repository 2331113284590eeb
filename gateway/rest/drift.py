"""How far a session's turns share one history: the fewer rows they make, the less is computed twice.

root ─ a ─ b      five turns, two rows: merge_ratio 0.4
     └ c ─ d      (a row for each turn that no other continues; a row for every turn would be 1.0)
"""

from collections import Counter

from gateway.rest.shapes import Drift
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn


def merge_ratio_of(head: SessionHead) -> float | None:
    """Rows per turn; None for a session without turns that make rows."""
    turns = _trainable(head)
    continued = {turn.parent_id for turn in turns}
    rows = sum(turn.turn_id not in continued for turn in turns)
    return rows / len(turns) if turns else None


def drift_of(head: SessionHead) -> Drift:
    """The number of turns that extend their parent, were rendered again, or fork, and why they fork."""
    turns = _trainable(head)
    relations = Counter(head.relation_of(turn) for turn in turns)
    forks = Counter(turn.reason or "" for turn in turns if head.relation_of(turn) == "forks")
    return {
        "extends": relations["extends"],
        "rerendered": relations["rerendered"],
        "forks": dict(sorted(forks.items())),
    }


def _trainable(head: SessionHead) -> list[Turn]:
    """The turns that make rows: not the aborted ones, nor those that a retry replaced."""
    return [turn for turn in head.turns if turn.finish != "abort" and turn.turn_id not in head.orphans]
