"""Sizes in sentences, and curves of text."""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


EIGHTHS = " ▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int, height: int) -> Iterator[str]:
    """The values from left to right in lines of text, the highest first; the axis has the extremes. Where
    there are more values than columns, a column is the mean of some."""
    if not values:
        return
    edges = [column * len(values) // min(width, len(values)) for column in range(min(width, len(values)) + 1)]
    columns = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(columns), max(columns)
    levels = [8 * height * (each - low) / (high - low or 1.0) for each in columns]
    for row in reversed(range(height)):
        label = f"{high:8.3f}" if row == height - 1 else f"{low:8.3f}" if row == 0 else " " * 8
        drawn = "".join(EIGHTHS[max(0, min(8, round(level) - 8 * row))] for level in levels)
        yield f"{label} │{drawn}"
