"""Finds the sessions and groups that an earlier trainer process has finished, by their verdicts in Redis.

    ids of new sessions and groups ─▶ read_finished ─▶ FinishedEarlier(settled, gone)

A checkpoint also stores the sessions and groups that were finished before it. But a group that ends without a
step gets its verdicts between two checkpoints, and the process may end before it writes the next checkpoint.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from rollout_queue.contract.episodes import CLOSING
from rollout_queue.contract.stream import GroupMembers, StreamReader

GIVEN_BY_GATEWAYS = frozenset({*CLOSING, "deleted"})
"""Verdicts that gateways give. A session with one of them counts in its group until the trainer ends the
group."""


class FinishedEarlier(NamedTuple):
    """The ids of finished sessions and groups."""

    settled: frozenset[str]
    """Sessions that have a verdict of the trainer."""
    gone: frozenset[str]
    """Groups that have ended, perhaps without some of their members."""


def read_finished(
    stream: StreamReader, session_ids: Collection[str], group_ids: Collection[str]
) -> FinishedEarlier:
    """Which of these sessions and groups are finished. Sessions and groups that Redis does not know count as
    new. Raises StorageUnavailable."""
    groups = stream.group_members(group_ids)
    asked = (each.members for each in groups.values() if each.size is not None and not each.forgotten)
    codes = stream.verdict_codes({*session_ids}.union(*asked))
    settled = frozenset(each for each in session_ids if _is_settled(codes.get(each)))
    gone = frozenset(group_id for group_id, group in groups.items() if _is_gone(group, codes))
    return FinishedEarlier(settled, gone)


def _is_settled(code: str | None) -> bool:
    return code is not None and code not in GIVEN_BY_GATEWAYS


def _is_gone(group: GroupMembers, codes: Mapping[str, str]) -> bool:
    """Whether the group has ended. There are three cases: one member has a verdict of the trainer, which ends
    groups as a whole; all members have verdicts; or Redis has removed members some time after their verdicts
    (`forgotten`). A group without a size is never gone: it ends when it gets no record for
    long, and begins again with its next record."""
    if group.size is None:
        return False
    if group.forgotten:
        return True
    ended = [codes[member] for member in group.members if member in codes]
    return any(_is_settled(code) for code in ended) or len(ended) == group.size
