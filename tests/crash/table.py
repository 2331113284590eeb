"""The crash matrix as a table: by window, how often it was meant and hit, and how long healing took."""

import statistics
from collections.abc import Sequence

from tests.crash.drive import Kill
from tests.crash.windows import WINDOWS


def table(kills: Sequence[Kill]) -> str:
    """Markdown. A kill that missed its moment was one at another moment, and counts as such."""
    lines = [
        "| killed | moment | kills | of them at the moment | healed after s, median |",
        "|---|---|---|---|---|",
    ]
    for window in WINDOWS:
        own = [kill for kill in kills if kill.window == window]
        if own:
            healed = statistics.median(kill.healed_s for kill in own)
            hits = sum(kill.hit for kill in own)
            lines.append(f"| {window.victim} | {window.name} | {len(own)} | {hits} | {healed:.1f} |")
    hits = sum(kill.hit for kill in kills)
    lines.append(f"| all | | {len(kills)} | {hits} | |")
    return "\n".join(lines)
