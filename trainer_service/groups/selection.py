"""Selects the groups of the next step.

complete groups ─ screen, one after the other ─┬─▶ skipped: they end without a step
                                               └─▶ live: the first ones make the step
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup, screen
from trainer_service.groups.undone import Recovery


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
