"""Drift: how many turns of a session do not extend their parent turn, so that training needs another row.

root ─ a ─ b      five turns, two leaves, so two training rows: merge_ratio 2 / 5 = 0.4
     └ c ─ d      (1.0: every turn has a row of its own, and the trainer computes shared tokens again)

extends      the turn's prompt begins with all tokens of its parent, which has no earlier child
forks        the turn is a later child of its parent, or continues no turn; its `reason` says why
rerendered   the agent only added messages, but the chat template changed the tokens of earlier ones
"""

from collections import Counter

from gateway.rest.turns.shapes import Drift
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn


def merge_ratio_of(head: SessionHead) -> float | None:
    """Rows per turn; None if no turn makes a row."""
    turns = _trainable(head)
    continued = {turn.parent_id for turn in turns}
    rows = sum(turn.turn_id not in continued for turn in turns)
    return rows / len(turns) if turns else None


def drift_of(head: SessionHead) -> Drift:
    """The number of turns by relation, and of forks by reason."""
    turns = _trainable(head)
    relations = Counter(head.relation_of(turn) for turn in turns)
    forks = Counter(turn.reason or "" for turn in turns if head.relation_of(turn) == "forks")
    return {
        "extends": relations["extends"],
        "rerendered": relations["rerendered"],
        "forks": dict(sorted(forks.items())),
    }


def _trainable(head: SessionHead) -> list[Turn]:
    """The turns that make rows: all but aborted turns and turns that a retry replaced."""
    return [turn for turn in head.turns if turn.finish != "abort" and turn.turn_id not in head.orphans]
