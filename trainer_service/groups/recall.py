"""What a trainer before this one had finished with, told by the verdicts that it left in Redis.

a session or a group that is new here ─▶ recalled ─┬─ settled: what still comes of the session changes nothing
                                                   └─ gone: the group went, and its other members are late

A checkpoint says the same of everything before it. Verdicts that end a group without a step come between two
checkpoints, and may be the last thing that a trainer did.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from rollout_queue.contract.episodes import CLOSING
from rollout_queue.contract.stream import Roll, StreamReader

OF_GATEWAYS = frozenset({*CLOSING, "deleted"})
"""A session that ended so counts in its group until that goes."""


class Recalled(NamedTuple):
    settled: frozenset[str]
    """Sessions."""
    gone: frozenset[str]
    """Groups."""


def recalled(stream: StreamReader, session_ids: Collection[str], group_ids: Collection[str]) -> Recalled:
    """Raises StorageUnavailable. What has no head and no tombstone is taken for new."""
    rolls = stream.rolls(group_ids)
    asked = (roll.members for roll in rolls.values() if roll.size is not None and not roll.forgotten)
    codes = stream.verdict_codes({*session_ids}.union(*asked))
    settled = frozenset(each for each in session_ids if _settled(codes.get(each)))
    return Recalled(settled, frozenset(group_id for group_id, roll in rolls.items() if _gone(roll, codes)))


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
