"""How far a session's turns kept to one history: the fewer rows they make, the less is computed twice.

root ─ a ─ b      five turns, two rows: merge_ratio 0.4
     └ c ─ d      (one row for each tip that nothing continues; one row a turn would be 1.0)
"""

from collections import Counter
from typing import Any

from rollout_queue.contract.head import SessionHead


def drift_of(head: SessionHead) -> dict[str, Any]:
    """Turns that extend, are rerendered, or fork and why; `merge_ratio` is rows per turn, null for none.

    Aborted turns, and those that a retry replaced, make no row.
    """
    turns = [turn for turn in head.turns if turn.finish != "abort" and turn.turn_id not in head.orphans]
    continued = {turn.parent_id for turn in turns}
    rows = sum(turn.turn_id not in continued for turn in turns)
    kinds = Counter(head.relation_of(turn) for turn in turns)
    forks = Counter(turn.reason or "" for turn in turns if head.relation_of(turn) == "forks")
    return {
        "merge_ratio": rows / len(turns) if turns else None,
        "drift": {
            "extends": kinds["extends"],
            "rerendered": kinds["rerendered"],
            "forks": dict(sorted(forks.items())),
        },
    }
