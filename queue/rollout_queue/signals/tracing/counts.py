"""What became of the spans of this process."""

from dataclasses import dataclass


@dataclass
class SpanCounts:
    """Of this process, since it started."""

    exported: int = 0
    queue_full: int = 0
    """Dropped, because as many wait as may wait."""
    not_taken: int = 0
    """Dropped, because the collector did not take them."""
