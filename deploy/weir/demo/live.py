"""The demo's live view: reward, episodes, step, policy version, staleness, and what the system waits for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from rollout_queue import clock
from weir.demo.episodes import WINDOW, EpisodeLog
from weir.demo.observer import Observation

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_LINE_EVERY_S = 5.0


class LiveView:
    """A panel on a terminal; elsewhere, a line every few seconds."""

    def __init__(self, record: EpisodeLog, snapshot: Observation) -> None:
        self._record = record
        self._snapshot = snapshot
        self._console = Console()
        self._printed_at = 0.0

    @contextmanager
    def showing(self) -> Iterator["LiveView"]:
        if not self._console.is_terminal:
            yield self
            return
        with Live(get_renderable=self._panel, console=self._console, refresh_per_second=4):
            yield self

    def tick(self) -> None:
        """Print a line where there is no terminal, at most every PLAIN_LINE_EVERY_S."""
        if self._console.is_terminal or clock.monotonic() - self._printed_at < PLAIN_LINE_EVERY_S:
            return
        self._printed_at = clock.monotonic()
        facts = "  ".join(f"{name} {value}" for name, value in self._facts())
        self._console.print(facts, highlight=False, soft_wrap=True)

    def _facts(self) -> list[tuple[str, str]]:
        record, snapshot = self._record, self._snapshot
        trainer = snapshot.trainer
        last = snapshot.steps[-1] if snapshot.steps else {}
        average = sum(record.window) / len(record.window) if record.window else None
        serving = snapshot.serving
        return [
            ("reward", f"{_number(average)} (last {len(record.window)} of {WINDOW})"),
            ("episodes", f"{len(record.episodes)} ({record.in_flight} in flight, {record.failures} failed)"),
            ("step", "-" if trainer.step is None else str(trainer.step)),
            ("version", "-" if serving is None else str(serving)),
            ("staleness", f"{_number(last.get('staleness/total_mean'))} versions"),
            ("|Δlogprob|", _number(last.get("mismatch/abs_logp"), 5)),
            ("waiting for", snapshot.waiting_for),
        ]

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        for name, value in self._facts():
            table.add_row(name, value)
        table.add_row("", self._curve())
        return Panel(table, title="weir demo", title_align="left")

    def _curve(self) -> str:
        """The reward so far, in about 48 blocks."""
        rewards = [each.reward for each in self._record.episodes if each.reward is not None]
        if not rewards:
            return ""
        size = max(1, len(rewards) // 48)
        means = [sum(rewards[i : i + size]) / size for i in range(0, len(rewards) - size + 1, size)]
        return "".join(BLOCKS[round(mean * (len(BLOCKS) - 1))] for mean in means)


def _number(value: Any, digits: int = 2) -> str:
    return "-" if value is None else f"{float(value):.{digits}f}"
