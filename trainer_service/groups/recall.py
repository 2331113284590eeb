"""What an earlier trainer process has finished with, read from the verdicts that it left in Redis.

    ids of new sessions and groups ─▶ read_finished ─▶ FinishedEarlier(settled, gone)

A checkpoint holds the same for everything before it. A group that ends without a step gets its verdicts
between two checkpoints, and those may be the last thing that a trainer writes before it dies.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from rollout_queue.contract.episodes import CLOSING
from rollout_queue.contract.stream import Roll, StreamReader

OF_GATEWAYS = frozenset({*CLOSING, "deleted"})
"""A session that ended so counts in its group until that goes."""


class FinishedEarlier(NamedTuple):
    settled: frozenset[str]
    """Sessions."""
    gone: frozenset[str]
    """Groups."""


def read_finished(
    stream: StreamReader, session_ids: Collection[str], group_ids: Collection[str]
) -> FinishedEarlier:
    """Raises StorageUnavailable. What has no head and no tombstone is taken for new."""
    rolls = stream.rolls(group_ids)
    asked = (roll.members for roll in rolls.values() if roll.size is not None and not roll.forgotten)
    codes = stream.verdict_codes({*session_ids}.union(*asked))
    settled = frozenset(each for each in session_ids if _settled(codes.get(each)))
    return FinishedEarlier(
        settled, frozenset(group_id for group_id, roll in rolls.items() if _gone(roll, codes))
    )


def _settled(code: str | None) -> bool:
    return code is not None and code not in OF_GATEWAYS


def _gone(roll: Roll, codes: Mapping[str, str]) -> bool:
    """A group goes as a whole, so one member tells. Where none of them was to be trained nothing tells, but
    nobody is missed either. A group of no size goes whenever it is silent, and begins anew."""
    if roll.size is None:
        return False
    if roll.forgotten:
        return True
    ended = [codes[member] for member in roll.members if member in codes]
    return any(_settled(code) for code in ended) or len(ended) == roll.size
