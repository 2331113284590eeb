"""One run of training on the real stack: SGLang, Redis, DeepSpeed, and agents with their groups in flight.

warm-started model ─▶ stack up ─▶ evaluation ─▶ episodes until the target ─▶ evaluation ─▶ Result
"""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from bench.kinds import KINDS, Kind
from bench.shelf import Mark, Result, Trial
from bench.stacks import beside_others
from weir.demo.episodes import Episodes, Record
from weir.demo.make_model import model_for
from weir.demo.observer import Observation, Observer
from weir.demo.report import account
from weir.demo.settings import services_of_demo
from weir.demo.watched import watched
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

GROUP_SIZE = 8
GROUPS_PER_STEP = 4
"""As many as the demo's `min_live_rows` need."""
FEWEST_GROUPS = 8
"""In flight without staleness: some teach nothing. The gateway lets in as many as the next step takes."""
EVALUATED, EVALUATION_SEED, EVALUATION_GROUPS = 256, 1000, 8
KNOCK_EVERY_S = 0.2
"""How soon a refused agent comes again. `Retry-After` is in whole seconds: each step would cost one."""
LOOK_EVERY_S = 0.25
CURVE_POINTS = 200
HEAVY = ("redis", "policies", "weights", "checkpoints", "tensorboard")
BUSY = ("train", "checkpoint", "acknowledge")


@dataclass(frozen=True)
class Bounds:
    """When a run has had enough."""

    target: float = 0.9
    """Mean reward of the last episodes."""
    episodes: int = 8000
    seconds: float = 900.0


@dataclass
class Looks:
    """What was seen of the engine, look by look: its requests, waiting ones too."""

    requests: list[int] = field(default_factory=list)

    async def watch(self, rollout_url: str, admin_key: str) -> None:
        """Look until cancelled; an engine that does not answer is not counted."""
        headers = {"authorization": f"Bearer {admin_key}"}
        async with httpx.AsyncClient(base_url=rollout_url, headers=headers, timeout=5) as rest:
            while True:
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    said = (await rest.get("/status")).raise_for_status().json()
                    self.requests.append(said["running"] + said["waiting"])
                await asyncio.sleep(LOOK_EVERY_S)


@dataclass
class Course:
    """How a run goes, until it is enough."""

    bounds: Bounds
    snapshot: Observation
    reached: Mark | None = None
    whole: Mark | None = None
    ended: str = ""
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def enough(self, record: Record) -> bool:
        """Asked after every group; the first yes is remembered, and stays."""
        if self.whole is not None:
            return True
        here = Mark(time.monotonic() - record.started_at, len(record.episodes), len(self.snapshot.steps))
        average = record.moving_average
        if average is not None and (not self.curve or here.episodes > self.curve[-1][0]):
            self.curve.append((here.episodes, round(here.seconds, 2), round(average, 4)))
        if average is not None and average >= self.bounds.target:
            self.reached = here
        self.ended = self._why(here)
        if self.ended:
            self.whole = here
        return self.whole is not None

    def _why(self, here: Mark) -> str:
        if self.reached is not None:
            return f"reward {self.bounds.target:g} after {here.seconds:.0f} s"
        if self.snapshot.trainer.state == "paused":
            return f"the trainer paused itself: {self.snapshot.trainer.waiting_for}"
        if here.episodes >= self.bounds.episodes:
            return f"no reward of {self.bounds.target:g} within {here.episodes} episodes"
        if here.seconds >= self.bounds.seconds:
            return f"no reward of {self.bounds.target:g} within {here.seconds:.0f} s"
        return ""


@dataclass
class Laps:
    """Seconds by name, one after the other."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 1)


def run(trial: Trial, bounds: Bounds, folder: Path, models: Path) -> Result:
    """Raises StackError when a service dies, or the warm start does not reach its gate."""
    kind, laps, run_dir = KINDS[trial.task], Laps(), folder / trial.name
    with laps.timed("model"):
        model, _ = model_for(models, trial.seed, game=kind.model, write=kind.plan)
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was stopped: it would be trained first
    settings = settings_of(trial, run_dir, model)
    began = time.monotonic()
    with Stack(settings) as stack:
        stack.wait_ready(on_wait=lambda line: print(line, flush=True))
        laps.seconds["start"] = round(time.monotonic() - began, 1)
        with laps.timed("evaluation before"):
            warm = asyncio.run(evaluated(stack, settings, kind))
        with laps.timed("episodes"):
            course, record, looks = asyncio.run(_play(stack, settings, trial, bounds))
        with laps.timed("evaluation after"):
            final = asyncio.run(evaluated(stack, settings, kind))
        verdicts = account(stack.gateway_url, settings.client_keys[0])
    for name in HEAVY:
        shutil.rmtree(run_dir / name, ignore_errors=True)
    return _result(trial, course, record, looks, (warm, final), verdicts, laps.seconds)


def settings_of(trial: Trial, run_dir: Path, model: Path) -> StackSettings:
    """The demo's, with the bound of staleness in both places: at the trainer, and before at the gateway."""
    versions, kind = trial.max_staleness, KINDS[trial.task]
    bound = {
        "gateway": {
            "limits": {"staleness_versions": versions},
            "poll_every_s": KNOCK_EVERY_S / 2,
            **kind.gateway,
        },
        "trainer": {"algorithm": {"max_staleness": versions, "stale": "drop" if versions else "wait"}},
    }
    return beside_others(run_dir, model, merged(services_of_demo(trial.seed), bound))


def groups_in_flight(max_staleness: int) -> int:
    """As many as may be under way at once: an episode is as old as the steps that are made while it lasts."""
    return max(FEWEST_GROUPS, GROUPS_PER_STEP * (max_staleness + 1))


async def evaluated(stack: Stack, settings: StackSettings, kind: Kind) -> float:
    """Mean reward of episodes that are not trained: at least `EVALUATED`, always the same tasks."""
    episodes = Episodes(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=EVALUATION_GROUPS,
        seed=EVALUATION_SEED,
        game=kind.measured,
        train=False,
    )
    record = await episodes.play(lambda so_far: len(so_far.episodes) + so_far.in_flight >= EVALUATED)
    return fmean(each.reward or 0.0 for each in record.episodes)


async def _play(
    stack: Stack, settings: StackSettings, trial: Trial, bounds: Bounds
) -> tuple[Course, Record, Looks]:
    episodes = Episodes(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=groups_in_flight(trial.max_staleness),
        seed=trial.seed,
        game=KINDS[trial.task].game,
        knock_every_s=KNOCK_EVERY_S,
    )
    admin_key = settings.admin_keys[0]
    observer, looks = Observer(stack.gateway_url, admin_key, settings.run_dir / "metrics.jsonl"), Looks()
    course = Course(bounds, observer.snapshot)
    looking = asyncio.create_task(looks.watch(stack.rollout_url, admin_key))

    def enough(so_far: Record) -> bool:
        if course.enough(so_far):
            looking.cancel()  # what comes now is the end of what was begun
        return course.whole is not None

    try:
        return course, await watched(stack, episodes, observer, enough), looks
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _result(
    trial: Trial,
    course: Course,
    record: Record,
    looks: Looks,
    rewards: tuple[float, float],
    verdicts: dict[str, int],
    seconds: dict[str, float],
) -> Result:
    whole = course.whole
    assert whole is not None  # noqa: S101 - nobody stops to play before it is enough
    steps = course.snapshot.steps[: whole.steps]
    return Result(
        trial=trial,
        ended=course.ended,
        reached=course.reached,
        whole=whole,
        reward_warm=rewards[0],
        reward_last=record.moving_average,
        reward_final=rewards[1],
        staleness_mean=_mean(steps, "staleness/total_mean"),
        staleness_max=max((step["staleness/total_max"] for step in steps), default=0.0),
        abs_logp=_mean(steps, "mismatch/abs_logp"),
        trains=_spent(steps, BUSY) / whole.seconds,
        publishes=_spent(steps, ("publish",)) / whole.seconds,
        engine_idle=fmean(each == 0 for each in looks.requests) if looks.requests else 0.0,
        engine_running=fmean(looks.requests) if looks.requests else 0.0,
        failures=record.failures,
        verdicts=verdicts,
        seconds=seconds,
        load=os.getloadavg()[0],
        curve=course.curve[:: max(1, len(course.curve) // CURVE_POINTS)],
    )


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    """Over the rows of all steps."""
    rows = [float(step["rows"]) for step in steps]
    weighted = sum(float(step[name]) * count for step, count in zip(steps, rows, strict=True))
    return weighted / sum(rows) if rows else 0.0


def _spent(steps: Sequence[dict[str, Any]], phases: Sequence[str]) -> float:
    return sum(float(step.get(f"seconds/{phase}", 0.0)) for step in steps for phase in phases)
