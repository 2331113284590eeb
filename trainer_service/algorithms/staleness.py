"""The age of a row in versions, split into the time of sampling and the time of waiting."""

from typing import NamedTuple


class Staleness(NamedTuple):
    """Versions between a row's first token and the step that trains it."""

    total: int
    in_flight: int
    """Between its first and its last token."""
    in_queue: int
    """Between its last token and the step."""


def staleness(version: int, first: int, last: int) -> Staleness:
    """The staleness of a row that versions `first` to `last` sampled, for a step that begins with `version`
    (prime-rl, where the step is numbered version + 1; `async.prime_staleness`)."""
    total = max(0, version - first)
    in_flight = min(total, max(0, last - first))
    return Staleness(total, in_flight, total - in_flight)
