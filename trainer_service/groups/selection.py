"""Selects the groups of the next step, in their order, and decides which groups no step will take any more.

complete groups ─ in_order ─ screen, one after the other ─┬─▶ skipped: they end without a step
                                                          └─▶ live: the first ones make the step
groups that a step passed over ─ note ─ overtaken ─▶ they end       groups beyond_bound ─▶ too many: they end

Groups pile up while the trainer is away. If it then took the newest first, the others, and those that arrive
meanwhile, would get too old. So after a restart it takes the oldest first, until none waits.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.guards import Recovery
from trainer_service.groups.screening import ScreenedGroup, is_too_old, screen, skipped_for_newer


class Batch(NamedTuple):
    """The groups of the next step, and the results for all groups that were screened."""

    groups: list[ScreenedGroup]
    """The groups that the step trains, in the order in which `select` got them."""
    full: bool
    """Whether `groups` are enough for a step now. If not, the step waits for more groups."""
    skipped: list[ScreenedGroup]
    """The groups that have nothing to train. They end, whether a step is made or not."""
    live_rows: int
    """Rows with an advantage in the groups that were screened."""


def select(
    complete: Iterable[Group],
    version: int,
    algorithm: AlgorithmSettings,
    flush: bool,
    undone: Sequence[Recovery] = (),
) -> Batch:
    """The first complete groups that fill a step: they have `min_live_rows` rows with an advantage. With
    `flush`, one such row is enough.

    When they have enough, further groups are added as long as the step has at most `max_rows` rows. A group
    is never split. Screening ends at the first group that does not fit. After an outage thousands of groups
    may wait, and otherwise each step would screen all of them again, with its own version.
    """
    batch = Batch([], False, [], 0)
    rows = selected = live_rows = 0
    for group in complete:
        screened = screen(group, version, algorithm, undone)
        if screened.skip_reason:
            batch.skipped.append(screened)
            continue
        live_rows += screened.live_rows
        if selected >= algorithm.min_live_rows and rows + len(screened.planned) > algorithm.max_rows:
            break
        batch.groups.append(screened)
        rows += len(screened.planned)
        selected += screened.live_rows
    full = selected >= algorithm.min_live_rows or (flush and selected > 0)
    return batch._replace(full=full, live_rows=live_rows)


class Order:
    """Remembers the groups that were complete when a step took others."""

    def __init__(self) -> None:
        self._passed_over: set[str] = set()
        self._catching_up = False
        self._waited: int | None = None
        """How many groups waited when the catching up was looked at last."""
        self._steps = 0
        """Steps since then."""
        self._beyond_bound: list[Group] = []
        """Of the last order: the groups that the bound has no place for, the newest first."""

    def catch_up(self) -> None:
        """From now on, take the oldest groups first: until none waits, or there are too many to train them in
        time."""
        self._catching_up, self._waited, self._steps = True, None, 0

    def in_order(
        self,
        complete: Sequence[Group],
        algorithm: AlgorithmSettings,
        first: Collection[str],
        prefers: Callable[[Group], bool],
    ) -> list[Group]:
        """`complete` has the group whose last record is the oldest first. Groups without a rollout lead,
        because they take no place in a step; then the groups whose ids are in `first`; then those that the
        curriculum `prefers`."""
        ordered = [group for group in complete if not group.rollouts]
        ordered += [group for group in complete if group.rollouts and group.group_id in first]
        waiting = [group for group in complete if group.rollouts and group.group_id not in first]
        bound = algorithm.max_waiting_groups if algorithm.intake == "bounded" else len(waiting)
        # A step takes from these only if the newest ones do not fill it.
        self._beyond_bound = waiting[: max(0, len(waiting) - bound)][::-1]
        for preferred in (True, False):
            part = [group for group in waiting[len(self._beyond_bound) :] if prefers(group) == preferred]
            newest_first = algorithm.intake == "newest" and not self._catching_up
            ordered += mixed(part, algorithm.replay_share) if newest_first else part
        return ordered + self._beyond_bound

    def overtaken(
        self, complete: Sequence[Group], version: int, algorithm: AlgorithmSettings
    ) -> list[ScreenedGroup]:
        """The ends of the groups that were passed over for newer ones until they were too old."""
        if algorithm.intake != "newest":
            return []
        self._passed_over.intersection_update(group.name for group in complete)
        reason = "other groups were trained until all of its rollouts were too old"
        ends = [
            skipped_for_newer(group, version, reason)
            for group in complete
            if group.name in self._passed_over and is_too_old(group, version, algorithm)
        ]
        self._catching_up &= not ends
        return ends

    def beyond_bound(self, batch: Batch, version: int, algorithm: AlgorithmSettings) -> list[ScreenedGroup]:
        """The ends of the groups that the bound has no place for. While the batch is not full, it needs every
        group."""
        if not batch.full:
            return []
        taken = _names(batch)
        reason = f"{algorithm.max_waiting_groups} newer groups wait, and no more may (max_waiting_groups)"
        return [
            skipped_for_newer(group, version, reason)
            for group in self._beyond_bound
            if group.name not in taken
        ]

    def note(self, complete: Iterable[Group], batch: Batch, algorithm: AlgorithmSettings) -> None:
        """Note the groups that a full batch leaves out."""
        if batch.full:
            left = {group.name for group in complete} - _names(batch)
            self._passed_over |= left
            self._note_waiting(len(left), algorithm.max_staleness)

    def _note_waiting(self, waiting: int, within_steps: int) -> None:
        """End the catching up if none waits, or if no fewer do than so many steps ago."""
        if self._waited is None:
            self._waited = waiting
        self._steps += 1
        if not waiting:
            self._catching_up = False
        elif self._steps > within_steps:
            self._catching_up &= waiting < self._waited
            self._waited, self._steps = waiting, 0


def mixed(oldest_first: Sequence[Group], replay_share: float) -> list[Group]:
    """The newest group first. However many groups a step takes from the front, at most `replay_share` of them
    come from the other end, the oldest."""
    left, found = deque(oldest_first), list[Group]()
    while left:
        taken = len(found)
        replays = int(replay_share * (taken + 1)) > int(replay_share * taken)
        found.append(left.popleft() if replays else left.pop())
    return found


def _names(batch: Batch) -> set[str]:
    return {each.group.name for each in (*batch.groups, *batch.skipped)}
