"""Trains one job: plays its rows, follows the versions that come of it, and evaluates some of them.

rows ──▶ groups of answers ──▶ rewards at the gateway ──▶ its trainer ──▶ version v
                                                                            ├─▶ checkpoint, metrics event
                                                                            └─▶ evaluation, every few versions
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from environments.errors import GatewayFault, RunStopped
from environments.results.journal import each_episode
from environments.results.versions import with_versions
from environments.runs.figures import RunFigures
from environments.runs.run import Run
from environments.settings import Mode, RunSettings
from environments.start import RunPlace, opened_run, read_run
from fine_tuning.files.rows import RowFile
from fine_tuning.jobs.job import FineTuningJob, JobCheckpoint, JobEvent
from fine_tuning.jobs.store import JobStore
from fine_tuning.settings import FineTuningSettings
from fine_tuning.training.evaluations import due_evaluation, end_evaluation, unfinished_evaluations
from fine_tuning.training.grading import AnswerGrader
from fine_tuning.training.rows_source import RowSource, answer_once
from fine_tuning.training.versions import GatewaySilent, PolicyWatch, answered
from reward_service.grading.runner import GraderRunner
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.protocol.policies import PolicyVersion

logger = logging.getLogger(__name__)

SLOWEST_END_S = 600.0
"""After the last episode, a job waits for further versions no longer than this."""
BESIDE_ANSWER_S = 30.0
"""How much longer an episode may take than its answer, so that a late answer ends as one."""


@dataclass
class JobTraining:
    """One job in training. It can be cancelled, and begun again by another process."""

    job: FineTuningJob
    settings: FineTuningSettings
    store: JobStore
    runner: GraderRunner
    policy: PolicyWatch
    _seen: int = 0
    """The last version that has a checkpoint, or the first version."""
    _evaluations: list[asyncio.Task[None]] = field(default_factory=list)
    """The last one that was begun during the training, if any."""
    _last_change: float = field(default_factory=clock.monotonic)

    async def train(self) -> str:
        """Train the job to its end; returns the name of the model. Raises GatewayFault, GatewaySilent,
        RunStopped and UnknownEnvironment."""
        checkpoints = self.store.checkpoints(self.job)
        self._seen = checkpoints[0].version if checkpoints else self.job.first_version or 0
        asked = self.job.asked.method.reinforcement.hyperparameters
        size = asked.answers(self.settings.group_size)
        rows = await self._rows("training")
        directory = self._directory / "run"
        settings = self._run_settings(directory, "train", size, episodes=asked.epochs * len(rows) * size)
        async with opened_run(
            settings, self._place(directory), self._source(rows), answer_once, _holds_a_run(directory)
        ) as (run, _):
            run.figures.take_fresh()  # earlier versions have them
            following = asyncio.create_task(self._follow(run))
            try:
                await _beside(following, run.play())
                await _beside(following, self._settled())
                following.cancel()
                serving = await answered(
                    lambda: self._served_in_the_end(run), self.settings.gateway_wait_s, self._warn
                )
                await asyncio.gather(*self._evaluations)
            finally:
                begun = [following, *self._evaluations]
                for task in begun:
                    task.cancel()
                await asyncio.gather(*begun, return_exceptions=True)
        if self.job.asked.validation_file is not None:
            for version in unfinished_evaluations(self._evaluations_dir):
                await self._evaluate(version)
            await self._evaluate(serving)
        return f"{self.job.model}@{serving}"

    @property
    def _directory(self) -> Path:
        return self.store.path(self.job)

    @property
    def _evaluations_dir(self) -> Path:
        return self._directory / "evals"

    def _place(self, directory: Path) -> RunPlace:
        return RunPlace(directory, self.settings.gateway_url, self.settings.gateway_key)

    async def _rows(self, name: str) -> RowFile:
        path = self._directory / f"{name}.jsonl"
        return await asyncio.to_thread(RowFile, path, self.settings.limits)

    def _source(self, rows: RowFile) -> RowSource:
        grader = AnswerGrader(self.runner, self.job.asked.method.reinforcement.grader)
        return RowSource(self.job.id, rows, grader, self.settings.answer_s)

    def _run_settings(
        self, directory: Path, mode: Mode, group_size: int, episodes: int | None = None
    ) -> RunSettings:
        """Of a run that has begun, what its answers have in common is as it was when it began."""
        asked = self.job.asked.method.reinforcement
        sampling = dict(self.settings.sampling)
        if asked.response_format is not None:
            sampling["response_format"] = asked.response_format
        if asked.hyperparameters.reasoning_effort != "default":
            sampling["reasoning_effort"] = asked.hyperparameters.reasoning_effort
        begun = read_run(directory)["settings"] if _holds_a_run(directory) else {}
        alike = {"group_size": group_size, "episodes": episodes, "sampling": sampling}
        return RunSettings(
            environment=f"fine_tuning:{self.job.id}",
            mode=mode,
            seed=self.job.seed,
            concurrency=self.settings.concurrency,
            episode_s=self.settings.answer_s + BESIDE_ANSWER_S,
            wait_s=self.settings.gateway_wait_s,
            **{name: begun.get(name, value) for name, value in alike.items()},
        )

    async def _follow(self, run: Run) -> NoReturn:
        """Look for new versions until cancelled. A gateway that is away may come back; raises what else goes
        wrong, which ends the job."""
        while True:
            try:
                await self._look(run)
            except GatewaySilent as error:
                logger.warning("job %s: the versions cannot be read: %s", self.job.id, error)
            await clock.sleep(self.settings.poll_every_s)

    async def _look(self, run: Run) -> None:
        """Record each new version, and begin an evaluation when it is due. Raises GatewaySilent."""
        fresh = await self.policy.published_after(self._seen)
        for version in fresh:
            self._record(version, run.figures)
        for task in self._evaluations:
            if task.done():
                task.result()  # raises what ended it
        evaluating = any(not task.done() for task in self._evaluations)
        if not evaluating and (due := self._due()) is not None:
            self._evaluations = [asyncio.create_task(self._evaluate(due))]

    async def _served_in_the_end(self, run: Run) -> int:
        """The version that is served, after it has its checkpoint. Raises GatewaySilent."""
        while True:
            await self._look(run)
            serving = await self.policy.serving()
            if serving <= self._seen:  # a lower one after a rollback
                return serving

    def _record(self, version: PolicyVersion, figures: RunFigures) -> None:
        reward = figures.take_fresh().mean
        step = version.version if version.step is None else version.step
        metrics = {"step": step, "version": version.version, "episodes": figures.ended}
        mean = {} if reward is None else {"reward_mean": reward}
        self._seen, self._last_change = version.version, clock.monotonic()
        checkpoint = JobCheckpoint(
            f"ftckpt_{new_id()}",
            int(version.created_at or clock.now()),
            f"{self.job.model}@{version.version}",
            self.job.id,
            step,
            metrics | mean,
            version.version,
        )
        self.store.checkpoint(self.job, checkpoint)
        told = f", mean reward {mean['reward_mean']:.4f}" if mean else ""
        self._tell(f"Step {step}: version {version.version}{told}", metrics | mean)

    def _warn(self, message: str) -> None:
        self.store.tell(self.job, JobEvent.of(message[:2000], "warn"))

    def _tell(self, message: str, metrics: dict[str, Any]) -> None:
        self.store.tell(self.job, JobEvent.of(message, metrics=metrics))

    def _due(self) -> int | None:
        """The version of the evaluation that is to begin now."""
        if self.job.asked.validation_file is None:
            return None
        interval = self.job.asked.method.reinforcement.hyperparameters.steps_between_evals
        versions = [each.version for each in self.store.checkpoints(self.job)]
        return due_evaluation(self._evaluations_dir, versions, interval)

    async def _evaluate(self, version: int) -> None:
        """Evaluate. The job goes on if that fails."""
        try:
            await self._play_evaluation(version)
        except (GatewayFault, RunStopped) as error:
            self._warn(f"The evaluation at version {version} failed: {error}")
        end_evaluation(self._evaluations_dir, version)

    async def _play_evaluation(self, version: int) -> None:
        """Play the validation file once. The live model answers, so that no answer waits for a version which
        no server has any more; the event names the versions that answered."""
        directory = self._evaluations_dir / str(version)
        if (directory / "ended").exists():
            return
        asked = self.job.asked.method.reinforcement.hyperparameters
        settings = self._run_settings(directory, "eval", asked.samples)
        source = self._source(await self._rows("validation"))
        place = self._place(directory)
        async with opened_run(settings, place, source, answer_once, _holds_a_run(directory)) as (
            run,
            gateway,
        ):
            await run.play()
            ended = await with_versions(gateway, each_episode(directory))
        rewards = [each.reward for each in ended if each.reward is not None]
        mean = fmean(rewards) if rewards else None
        versions = sorted({served for each in ended for served in each.versions})
        told = "no answer was graded" if mean is None else f"mean reward {mean:.4f} of {len(rewards)} answers"
        metrics = {
            "version": version,
            "valid_reward_mean": mean,
            "valid_answers": len(rewards),
            "valid_failed": len(ended) - len(rewards),
            "versions": versions,
        }
        self._tell(f"Evaluation at version {version}: {told}", metrics)

    async def _settled(self) -> None:
        """Wait until no new version has come for a while: the trainer may still train the last groups."""
        began = clock.monotonic()
        self._last_change = began
        while (now := clock.monotonic()) - self._last_change < self.settings.settle_s:
            if now - began > SLOWEST_END_S:
                return
            await clock.sleep(min(self.settings.poll_every_s, self.settings.settle_s))


async def _beside(following: asyncio.Task[NoReturn], work: Coroutine[Any, Any, None]) -> None:
    """Do the work. Raises what ends `following` meanwhile, and cancels the work."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait((working, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _holds_a_run(directory: Path) -> bool:
    return (directory / "run.json").exists()
