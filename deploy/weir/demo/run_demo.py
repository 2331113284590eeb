"""`weir demo`: starts all services, plays episodes until the model has learned, reports, and stops them.

model (cached) ──▶ stack up ──▶ episodes ◀──▶ versions ──▶ summary.json, reward.png ──▶ stack down

While episodes are played, the services are checked, and a live view shows reward, episodes, step, policy
version, staleness, and what the system waits for.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from rollout_queue import clock
from weir.demo.demo_episodes import WINDOW, EpisodeLog, EpisodeRunner
from weir.demo.observer import Observation, Observer
from weir.demo.report import TARGET, VERSIONS, account, criterion, draw, served_versions, write_summary
from weir.demo.settings import with_demo_model
from weir.stack.run_keys import with_keys
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.stack_state import refuse_in_use

CHECK_EVERY_S = 0.25


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


async def watched(
    stack: Stack, episodes: EpisodeRunner, observer: Observer, enough: Callable[[EpisodeLog], bool]
) -> EpisodeLog:
    """Play until `enough` returns True. Raises ServiceDied when a service ends before that."""
    view = LiveView(episodes.record, observer.snapshot)
    watching = asyncio.create_task(observer.watch())
    tending = asyncio.create_task(_refresh(stack, view, episodes.record, observer))
    playing = asyncio.create_task(episodes.play(enough))
    try:
        await asyncio.wait({playing, tending}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(stack.check)
        return await playing
    finally:
        for task in (playing, tending, watching):
            task.cancel()
        await asyncio.gather(playing, tending, watching, return_exceptions=True)


async def _refresh(stack: Stack, view: LiveView, record: EpisodeLog, observer: Observer) -> None:
    """Update the view and check the services, again and again. Raises ServiceDied."""
    with view.showing():
        while True:
            await asyncio.to_thread(stack.check)
            record.version = observer.snapshot.serving
            view.tick()
            await clock.sleep(CHECK_EVERY_S)


GROUP_SIZE = 8
GROUPS_IN_FLIGHT = 4
MAX_EPISODES = 8000
MAX_SECONDS = 600.0
SETTLE_S = 20.0
"""How long the last sessions may take to get their verdicts."""

console = Console()


@dataclass
class PhaseTimes:
    """How long each phase took, seconds."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=clock.monotonic)

    def end(self, name: str) -> None:
        now = clock.monotonic()
        self.seconds[name] = round(now - self._since, 2)
        self._since = now


def run(settings: StackSettings, seed: int) -> int:
    """Run the demo. Returns 0 if the learning criterion (`report.criterion`) is met, else 1."""
    phases = PhaseTimes()
    refuse_in_use(settings.run_dir)
    with _progress() as say:
        settings, made = with_demo_model(settings, seed, say)
    settings = with_keys(settings)
    phases.end("model")
    _clear(settings.run_dir)
    with Stack(settings) as stack:
        with _progress() as say:
            stack.wait_ready(on_wait=say)
        phases.end("start")
        record, snapshot = asyncio.run(_play(settings, stack, seed))
        phases.end("episodes")
        verdicts, versions = _settled(settings, stack)
        versions |= {each.version for each in record.episodes if each.version}
        phases.end("settle")
    phases.end("stop")
    met = criterion(record, len(versions), verdicts)
    summary: dict[str, object] = {
        "seed": seed,
        "criterion": met,
        "reward_start": record.reward_start,
        "reward_end": record.moving_average,
        "episodes": len(record.episodes),
        "failed_episodes": record.failures,
        "steps": len(snapshot.steps),
        "versions_served": sorted(versions),
        "sessions_by_verdict": verdicts,
        "abs_logp": [step.get("mismatch/abs_logp") for step in snapshot.steps],
        "model_made": made,
        "seconds": phases.seconds,
    }
    summary_path, plot_path = settings.run_dir / "summary.json", settings.run_dir / "reward.png"
    write_summary(summary_path, summary)
    draw(plot_path, record, snapshot)
    console.print(_verdict(record, met, len(versions)), highlight=False)
    console.print(f"{summary_path}\n{plot_path}", highlight=False)
    return 0 if met["met"] else 1


async def _play(settings: StackSettings, stack: Stack, seed: int) -> tuple[EpisodeLog, Observation]:
    episodes = EpisodeRunner(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=GROUPS_IN_FLIGHT,
        seed=seed,
    )
    observer = Observer(stack.gateway_url, settings.admin_keys[0], settings.run_dir / "metrics.jsonl")
    began = clock.monotonic()

    def enough(record: EpisodeLog) -> bool:
        learned = (record.moving_average or 0.0) >= TARGET and len(observer.snapshot.steps) > VERSIONS
        return learned or len(record.episodes) >= MAX_EPISODES or clock.monotonic() - began > MAX_SECONDS

    return await watched(stack, episodes, observer, enough), observer.snapshot


def _settled(settings: StackSettings, stack: Stack) -> tuple[dict[str, int], set[int]]:
    """The number of sessions by verdict, once it no longer changes; and the versions that were served."""
    deadline, before = clock.monotonic() + SETTLE_S, None
    verdicts = account(stack.gateway_url, settings.client_keys[0])
    while verdicts != before and clock.monotonic() < deadline:
        clock.pause(1.0)
        before, verdicts = verdicts, account(stack.gateway_url, settings.client_keys[0])
    return verdicts, served_versions(stack.gateway_url, settings.admin_keys[0])


def _verdict(record: EpisodeLog, met: dict[str, bool], versions: int) -> str:
    start, end = record.reward_start or 0.0, record.moving_average or 0.0
    result = f"reward {start:.2f} → {end:.2f} in {len(record.episodes)} episodes, {versions} versions served"
    missed = [name for name, holds in met.items() if not holds and name != "met"]
    return result if met["met"] else f"{result}; not met: {', '.join(missed)}"


def _clear(run_dir: Path) -> None:
    """Remove the data of an earlier demo, because the trainer would train it first."""
    for name in ("redis", "policies", "weights", "checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in ("metrics.jsonl", "metrics.eval.jsonl", "summary.json", "reward.png"):
        (run_dir / name).unlink(missing_ok=True)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that shows progress: in one changing line on a terminal, in many lines elsewhere."""
    if not console.is_terminal:
        yield lambda line: console.print(line, highlight=False, soft_wrap=True)
        return
    with console.status("starting") as spinner:
        yield lambda line: spinner.update(escape(line))
