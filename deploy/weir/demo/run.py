"""`weir demo`: starts all services, plays episodes until the model has learned, reports, and stops them.

model (cached) ──▶ stack up ──▶ episodes ◀──▶ versions ──▶ summary.json, reward.png ──▶ stack down
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rollout_queue import clock
from weir.demo.episodes import EpisodeLog, EpisodeRunner
from weir.demo.observer import Observation, Observer
from weir.demo.report import TARGET, VERSIONS, account, criterion, draw, served_versions, write_summary
from weir.demo.settings import with_demo_model
from weir.demo.watched import watched
from weir.stack.keys import with_keys
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.state import refuse_in_use

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
