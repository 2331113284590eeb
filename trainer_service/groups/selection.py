"""Which groups the next step takes.

complete groups ─ screen, one after the other ─┬─▶ skipped: they end without a step
                                               └─▶ live: the oldest ones make the step
"""

from collections.abc import Iterable
from typing import NamedTuple

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.assemble import Group
from trainer_service.groups.screening import ScreenedGroup, screen


class Batch(NamedTuple):
    """The groups of the next step, and what was found on the way to them."""

    groups: list[ScreenedGroup]
    """Live groups, in the order in which they were given."""
    full: bool
    """Whether `groups` make a step now. If not, the step waits for more."""
    skipped: list[ScreenedGroup]
    """The groups that train nothing, whatever becomes of the step."""
    screened: list[Group]
    """Every group that was looked at."""
    live_rows: int
    """Rows with an advantage in the groups that were looked at."""


def select(complete: Iterable[Group], version: int, algorithm: AlgorithmSettings, flush: bool) -> Batch:
    """The first of the complete groups that fill a step: `min_live_rows` rows with an advantage, or fewer
    where `flush` says not to wait for more.

    `max_rows` limits the step once it has enough; a group is never split. At most one live group is screened
    that the step does not take: after an outage thousands of groups wait for later steps, and a later version
    would have to screen them again.
    """
    batch = Batch([], False, [], [], 0)
    rows = selected = live_rows = 0
    for group in complete:
        screened = screen(group, version, algorithm)
        batch.screened.append(group)
        if screened.skip_reason:
            batch.skipped.append(screened)
            continue
        live_rows += screened.live_rows
        if selected >= algorithm.min_live_rows and rows + len(screened.rows) > algorithm.max_rows:
            break
        batch.groups.append(screened)
        rows += len(screened.rows)
        selected += screened.live_rows
    full = selected >= algorithm.min_live_rows or (flush and selected > 0)
    return batch._replace(full=full, live_rows=live_rows)
