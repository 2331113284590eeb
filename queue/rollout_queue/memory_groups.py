"""The groups of the stream in memory, and whether a session may still get one."""

from collections.abc import Collection, Mapping, MutableMapping

from rollout_queue.contract.errors import Conflict, GroupTaken
from rollout_queue.contract.head import GroupProgress, SessionHead, group_progress, stage_of
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.stream import GroupMembers

Groups = MutableMapping[str, tuple[int | None, str, set[str]]]
"""The size, owner and members of each group, by its id."""


def join_group(groups: Groups, spec: SessionSpec) -> None:
    """Add the session to its group, if it has one. Raises Conflict."""
    group_id = spec.group_id
    if group_id is None:
        return
    size, owner, members = groups.get(group_id, (spec.group_size, spec.owner, set()))
    if owner != spec.owner:
        raise GroupTaken(spec.shown_group)
    if size is not None and spec.group_size not in (None, size):
        raise Conflict(f"group {spec.shown_group} has size {size}")
    size = spec.group_size if size is None else size
    if size is not None and len(members) >= size:
        raise Conflict(f"group {spec.shown_group} has its {size} sessions already")
    groups[group_id] = (size, owner, members | {spec.session_id})


def may_describe(known: SessionHead | None, deadline: float | None, now: float) -> bool:
    """Whether the session is implicit and has not ended; see `StreamWriter.describe_session`."""
    if known is None or not known.spec.implicit or known.outcome is not None or known.verdict is not None:
        return False
    return deadline is not None and deadline > now


def members_of(groups: Groups, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
    known = {group_id: groups[group_id] for group_id in group_ids if group_id in groups}
    return {
        group_id: GroupMembers(size, frozenset(members)) for group_id, (size, _, members) in known.items()
    }


def progress_of_group(groups: Groups, heads: Mapping[str, SessionHead], group_id: str) -> GroupProgress:
    size, _, members = groups.get(group_id, (None, "", set()))
    # A member without a head was deleted, and the group does not wait for it.
    found = [heads.get(member) for member in sorted(members)]
    return group_progress(size, ("decided" if head is None else stage_of(head) for head in found))
