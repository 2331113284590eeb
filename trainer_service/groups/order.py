"""Decides in which order steps take complete groups, and which groups no step will take any more.

complete groups ─ in_order ─▶ (select) ─ note ─▶ the groups that a step passed over ─ overtaken ─▶ they end
"""

from collections.abc import Collection, Iterable, Sequence

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup, overtaken
from trainer_service.groups.selection import Batch


class Order:
    """Remembers the groups that were complete when a step took others."""

    def __init__(self) -> None:
        self._passed_over: set[str] = set()

    def in_order(self, complete: Sequence[Group], intake: str, first: Collection[str]) -> list[Group]:
        """`complete` has the group whose last record is the oldest first. Groups without a rollout lead,
        because they take no place in a step; then the groups whose ids are in `first`."""
        ended = [group for group in complete if not group.rollouts]
        ordered = [group for group in complete if group.rollouts]
        if intake == "newest":
            ordered.reverse()
        return ended + sorted(ordered, key=lambda group: group.group_id not in first)

    def overtaken(
        self, complete: Sequence[Group], version: int, algorithm: AlgorithmSettings
    ) -> list[ScreenedGroup]:
        """The ends of the groups that were passed over for newer ones until they were too old."""
        if algorithm.intake != "newest":
            return []
        self._passed_over.intersection_update(group.name for group in complete)
        waiting = (group for group in complete if group.name in self._passed_over)
        return [end for group in waiting if (end := overtaken(group, version, algorithm))]

    def note(self, complete: Iterable[Group], batch: Batch) -> None:
        """Note the groups that a full batch leaves out."""
        if batch.full:
            taken = {each.group.name for each in (*batch.groups, *batch.skipped)}
            self._passed_over |= {group.name for group in complete} - taken
