"""What an earlier trainer process has finished with, read from the verdicts that it left in Redis.

    ids of new sessions and groups ─▶ read_finished ─▶ FinishedEarlier(settled, gone)

A checkpoint holds the same for everything before it. But a group that ends without a step gets its verdicts
between two checkpoints, and those may be the last thing that a trainer writes before it dies.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from rollout_queue.contract.episodes import CLOSING
from rollout_queue.contract.stream import GroupMembers, StreamReader

GIVEN_BY_GATEWAYS = frozenset({*CLOSING, "deleted"})
"""Verdicts that gateways give. Such a session counts in its group until the trainer ends the group."""


class FinishedEarlier(NamedTuple):
    """The ids of what needs no more work."""

    settled: frozenset[str]
    """Sessions that have their verdict."""
    gone: frozenset[str]
    """Groups that have ended, perhaps without some of their members."""


def read_finished(
    stream: StreamReader, session_ids: Collection[str], group_ids: Collection[str]
) -> FinishedEarlier:
    """Which of these sessions and groups have ended. Those of which Redis knows nothing are taken for new.
    Raises StorageUnavailable."""
    groups = stream.group_members(group_ids)
    asked = (each.members for each in groups.values() if each.size is not None and not each.forgotten)
    codes = stream.verdict_codes({*session_ids}.union(*asked))
    settled = frozenset(each for each in session_ids if _is_settled(codes.get(each)))
    gone = frozenset(group_id for group_id, group in groups.items() if _is_gone(group, codes))
    return FinishedEarlier(settled, gone)


def _is_settled(code: str | None) -> bool:
    return code is not None and code not in GIVEN_BY_GATEWAYS


def _is_gone(group: GroupMembers, codes: Mapping[str, str]) -> bool:
    """A group ends as a whole, so the trainer's verdict of one member is enough. A group whose members all
    have verdicts from gateways has nobody left to wait for. A group of unknown size is never gone: it ends
    whenever it had no record for long, and begins again with the next one."""
    if group.size is None:
        return False
    if group.forgotten:
        return True
    ended = [codes[member] for member in group.members if member in codes]
    return any(_is_settled(code) for code in ended) or len(ended) == group.size
