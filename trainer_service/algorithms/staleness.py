"""Computes the age of a row in versions, split into the time of sampling and the time of waiting.

`async.prime_staleness` is a case of `algorithms_golden.json` in the tests.
"""

from typing import NamedTuple


class Staleness(NamedTuple):
    """Numbers of versions between the sampling of a row and the step that trains it."""

    total: int
    in_flight: int
    """Between the row's oldest and newest token."""
    in_queue: int
    """Between the row's newest token and the step."""


def staleness(version: int, first: int, last: int) -> Staleness:
    """The staleness of a row in a step that begins with `version`. `first` and `last` are the oldest and
    newest version that sampled its tokens (prime-rl, where the step is numbered version + 1;
    `async.prime_staleness`)."""
    total = max(0, version - first)
    in_flight = min(total, max(0, last - first))
    return Staleness(total, in_flight, total - in_flight)
