"""One run of training on the real stack: SGLang, Redis, DeepSpeed, and agents with many groups in flight.

warm-started model ─▶ stack up ─▶ evaluation ─▶ episodes until the target ─▶ evaluation ─▶ Result
"""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from bench.isolated_stack import isolated_stack
from bench.results import Progress, Result, Trial
from bench.tasks import TASKS, TrainingTask
from weir.demo.demo_episodes import EpisodeLog, EpisodeRunner
from weir.demo.make_model import model_for
from weir.demo.observer import Observation, Observer
from weir.demo.report import account
from weir.demo.run_demo import watched
from weir.demo.settings import services_of_demo
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

GROUP_SIZE = 8
GROUPS_PER_STEP = 4
"""The number of groups that gives the demo's `min_live_rows` rows."""
MIN_GROUPS = 8
"""The smallest number of groups in flight. It is more than a step takes, because a group with equal rewards
gives no learning signal. The gateway admits only as many sessions as the next step takes."""
EVALUATED, EVALUATION_SEED, EVALUATION_GROUPS = 256, 1000, 8
RETRY_EVERY_S = 0.2
"""The time after which an agent asks again for a group that the gateway refused. The header `Retry-After` has
whole seconds, which would delay each step."""
POLL_EVERY_S = 0.25
CURVE_POINTS = 200
LARGE_FOLDERS = ("redis", "policies", "weights", "checkpoints", "tensorboard")
TRAINING_PHASES = ("train", "checkpoint", "acknowledge")


@dataclass(frozen=True)
class Bounds:
    """When a run ends."""

    target: float = 0.9
    """Mean reward of the last episodes."""
    episodes: int = 8000
    seconds: float = 900.0


@dataclass
class EngineRequests:
    """The number of requests at the engine at each poll, waiting ones included."""

    requests: list[int] = field(default_factory=list)

    async def watch(self, rollout_url: str, admin_key: str) -> None:
        """Poll until cancelled. A poll without an answer is not counted."""
        headers = {"authorization": f"Bearer {admin_key}"}
        async with httpx.AsyncClient(base_url=rollout_url, headers=headers, timeout=5) as rest:
            while True:
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    status = (await rest.get("/status")).raise_for_status().json()
                    self.requests.append(status["running"] + status["waiting"])
                await asyncio.sleep(POLL_EVERY_S)


@dataclass
class TrialCourse:
    """The progress of a run until it ends."""

    bounds: Bounds
    snapshot: Observation
    reached: Progress | None = None
    whole: Progress | None = None
    ended: str = ""
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def has_ended(self, record: EpisodeLog) -> bool:
        """Whether the run has ended. The runner asks before each group. Once True, the answer stays True."""
        if self.whole is not None:
            return True
        here = Progress(time.monotonic() - record.started_at, len(record.episodes), len(self.snapshot.steps))
        average = record.moving_average
        if average is not None and (not self.curve or here.episodes > self.curve[-1][0]):
            self.curve.append((here.episodes, round(here.seconds, 2), round(average, 4)))
        if average is not None and average >= self.bounds.target:
            self.reached = here
        self.ended = self._why(here)
        if self.ended:
            self.whole = here
        return self.whole is not None

    def _why(self, here: Progress) -> str:
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
class TrialTimes:
    """The seconds of a run's phases, by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 1)


def run(trial: Trial, bounds: Bounds, folder: Path, models: Path) -> Result:
    """Make one run. Raises StackError if a service dies, or if the warm start fails."""
    task, times, run_dir = TASKS[trial.task], TrialTimes(), folder / trial.name
    with times.timed("model"):
        model, _ = model_for(models, trial.seed, game=task.model, write=task.plan)
    shutil.rmtree(run_dir, ignore_errors=True)  # the data of an interrupted run would be trained first
    settings = settings_of(trial, run_dir, model)
    began = time.monotonic()
    with Stack(settings) as stack:
        stack.wait_ready(on_wait=lambda line: print(line, flush=True))
        times.seconds["start"] = round(time.monotonic() - began, 1)
        with times.timed("evaluation before"):
            warm = asyncio.run(evaluated(stack, settings, task))
        with times.timed("episodes"):
            course, record, engine = asyncio.run(_play(stack, settings, trial, bounds))
        with times.timed("evaluation after"):
            final = asyncio.run(evaluated(stack, settings, task))
        verdicts = account(stack.gateway_url, settings.client_keys[0])
    for name in LARGE_FOLDERS:
        shutil.rmtree(run_dir / name, ignore_errors=True)
    return _result(trial, course, record, engine, (warm, final), verdicts, times.seconds)


def settings_of(trial: Trial, run_dir: Path, model: Path) -> StackSettings:
    """The demo's settings, with the bound of staleness in both trainer and gateway."""
    versions, task = trial.max_staleness, TASKS[trial.task]
    bound = {
        "gateway": {
            "limits": {"staleness_versions": versions},
            "poll_every_s": RETRY_EVERY_S / 2,
            **task.gateway,
        },
        "trainer": {"algorithm": {"max_staleness": versions, "stale": "drop" if versions else "wait"}},
    }
    return isolated_stack(run_dir, model, merged(services_of_demo(trial.seed), bound))


def groups_in_flight(max_staleness: int) -> int:
    """How many groups may be in flight. An episode's staleness is the number of steps that are made while it
    lasts, so more groups mean more staleness."""
    return max(MIN_GROUPS, GROUPS_PER_STEP * (max_staleness + 1))


async def evaluated(stack: Stack, settings: StackSettings, task: TrainingTask) -> float:
    """The mean reward of at least `EVALUATED` episodes that are not trained, always with the same tasks."""
    episodes = EpisodeRunner(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=EVALUATION_GROUPS,
        seed=EVALUATION_SEED,
        game=task.measured,
        train=False,
    )
    record = await episodes.play(lambda so_far: len(so_far.episodes) + so_far.in_flight >= EVALUATED)
    return fmean(each.reward or 0.0 for each in record.episodes)


async def _play(
    stack: Stack, settings: StackSettings, trial: Trial, bounds: Bounds
) -> tuple[TrialCourse, EpisodeLog, EngineRequests]:
    episodes = EpisodeRunner(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=groups_in_flight(trial.max_staleness),
        seed=trial.seed,
        game=TASKS[trial.task].game,
        retry_every_s=RETRY_EVERY_S,
    )
    admin_key = settings.admin_keys[0]
    observer, engine = (
        Observer(stack.gateway_url, admin_key, settings.run_dir / "metrics.jsonl"),
        EngineRequests(),
    )
    course = TrialCourse(bounds, observer.snapshot)
    polling = asyncio.create_task(engine.watch(stack.rollout_url, admin_key))

    def has_ended(so_far: EpisodeLog) -> bool:
        if course.has_ended(so_far):
            polling.cancel()  # from now on, only the groups in flight are played to their end
        return course.whole is not None

    try:
        return course, await watched(stack, episodes, observer, has_ended), engine
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)


def _result(
    trial: Trial,
    course: TrialCourse,
    record: EpisodeLog,
    engine: EngineRequests,
    rewards: tuple[float, float],
    verdicts: dict[str, int],
    seconds: dict[str, float],
) -> Result:
    whole = course.whole
    assert whole is not None  # noqa: S101 - `play` returns after the run has ended
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
        trains=_spent(steps, TRAINING_PHASES) / whole.seconds,
        publishes=_spent(steps, ("publish",)) / whole.seconds,
        engine_idle=fmean(each == 0 for each in engine.requests) if engine.requests else 0.0,
        engine_running=fmean(engine.requests) if engine.requests else 0.0,
        failures=record.failures,
        verdicts=verdicts,
        seconds=seconds,
        load=os.getloadavg()[0],
        curve=course.curve[:: max(1, len(course.curve) // CURVE_POINTS)],
    )


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows of all steps."""
    rows = [float(step["rows"]) for step in steps]
    weighted = sum(float(step[name]) * count for step, count in zip(steps, rows, strict=True))
    return weighted / sum(rows) if rows else 0.0


def _spent(steps: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> float:
    return sum(float(step.get(f"seconds/{phase}", 0.0)) for step in steps for phase in phases)
