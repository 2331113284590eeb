"""Trains one job: plays its rows, follows the versions that come of it, and evaluates some of them.

rows ──▶ groups of answers ──▶ rewards at the gateway ──▶ its trainer ──▶ version v
                                                                            ├─▶ checkpoint, metrics event
                                                                            └─▶ evaluation, every few versions

A row is an environment of one answer, whose reward is the score that the job's grader gives it in this
process. A directory of evaluations says which one is next, so that a killed service loses none:

evals/12/run.json   begun at version 12        evals/12/ended   played, or failed
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from openai import APIStatusError
from openai.types.chat import ChatCompletionMessage

from environments.agents import Agent
from environments.environment import Description, Step, Task
from environments.errors import EnvironmentFault, GatewayFault, RunStopped, fills_context
from environments.results import each_episode, with_versions
from environments.run import Run, RunFigures
from environments.settings import Mode, RunSettings
from environments.start_run import RunPlace, opened_run, read_run
from environments.task_ids import task_id
from fine_tuning.jobs import FineTuningJob, JobCheckpoint, JobEvent, JobStore
from fine_tuning.served_versions import GatewaySilent, PolicyWatch, answered
from fine_tuning.settings import FineTuningSettings
from fine_tuning.training_files import RowFile, TrainingRow
from reward_service.grader_runner import GraderRunner
from reward_service.graders.grade import sample_of
from reward_service.graders.grader_objects import AnyGrader
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.protocol.gateway_messages import PolicyVersion


def unfinished_evaluations(directory: Path) -> list[int]:
    """The versions whose evaluations were begun and have not ended, the oldest first."""
    return [each for each in _begun(directory) if not (directory / str(each) / "ended").exists()]


def due_evaluation(directory: Path, versions: Sequence[int], interval: int) -> int | None:
    """The version of the evaluation that is to be played now: an unfinished one, or at the newest of the
    job's `versions` if these crossed a multiple of `interval` since the last one was begun."""
    if unfinished := unfinished_evaluations(directory):
        return unfinished[0]
    last = max(_begun(directory), default=0)
    before = sum(version <= last for version in versions)
    return max(versions) if len(versions) // interval > before // interval else None


def end_evaluation(directory: Path, version: int) -> None:
    """It is not played again."""
    place = directory / str(version)
    place.mkdir(parents=True, exist_ok=True)
    (place / "ended").touch()


def _begun(directory: Path) -> list[int]:
    return sorted(int(each.name) for each in directory.glob("*") if each.name.isdecimal())


class GradeUnavailable(Exception):
    """The grader could not score the answer."""


class AnswerGrader:
    """The grader of one job."""

    def __init__(self, runner: GraderRunner, grader: AnyGrader) -> None:
        self._runner, self._grader = runner, grader

    async def reward(
        self, message: ChatCompletionMessage, finish_reason: str, item: Mapping[str, Any]
    ) -> float:
        """Raises GradeUnavailable: a missing reward is not 0."""
        shown = message.model_dump(exclude_none=True)
        sample = sample_of(message.content or "", shown, finish_reason)
        grade = await self._runner.run(self._grader, {"sample": sample, "item": item})
        if grade.errors.any:
            raise GradeUnavailable(str(grade.errors))
        return grade.reward


class RowEnvironment:
    """One row. The model answers it once; the answer and its grade may take `answer_s` seconds."""

    def __init__(self, rows: RowFile, grader: AnswerGrader, answer_s: float) -> None:
        self._rows, self._grader, self.answer_s = rows, grader, answer_s
        self._row: TrainingRow | None = None

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._row.tools if self._row else ()

    async def reset(self, task: Task) -> Step:
        self._row = self._rows.row(int(task.data["row"]))
        return Step(messages=tuple(self._row.messages))

    async def graded(self, message: ChatCompletionMessage, finish_reason: str) -> Step:
        """The end, with the grader's reward. Raises EnvironmentFault if there is none: that is never a 0."""
        item = self._row.item if self._row else {}
        try:
            reward = await self._grader.reward(message, finish_reason, item)
        except GradeUnavailable as error:
            raise EnvironmentFault(f"the grader gave no reward: {error}") from error
        return Step(reward=reward, terminated=True)

    async def step(self, answer: str) -> Step:
        return await self.graded(ChatCompletionMessage(role="assistant", content=answer), "stop")

    async def call(self, name: str, arguments: str) -> Step:
        raise EnvironmentFault("the tools of a row are offered, and not run")

    async def close(self) -> None: ...


class RowSource:
    """Every row of a file is a task."""

    def __init__(self, name: str, rows: RowFile, grader: AnswerGrader, answer_s: float) -> None:
        self.description = Description(name=name, task_count=len(rows))
        self._name, self._rows, self._grader, self._answer_s = name, rows, grader, answer_s

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        last = min(len(self._rows), start + count)
        return [Task(task_id(self._name, number), {"row": number}) for number in range(start, last)]

    def environment(self) -> RowEnvironment:
        return RowEnvironment(self._rows, self._grader, self._answer_s)

    async def __aenter__(self) -> "RowSource":
        return self

    async def __aexit__(self, *error: object) -> None: ...


async def answer_once(agents: list[Agent], environment: RowEnvironment, task: Task, max_turns: int) -> Step:
    """The loop of a row: its messages, one answer, and the grade. A call of a tool is an answer as well.
    Raises EnvironmentFault for every answer without a reward, so that a job without rewards fails."""
    (agent,) = agents
    agent.hears((await environment.reset(task)).messages)
    try:
        async with clock.timeout(environment.answer_s):
            message = await agent.answer(environment.tools)
            step = await environment.graded(message, agent.finish_reason)
    except TimeoutError as error:
        raise EnvironmentFault(f"no answer with a grade within {environment.answer_s} s") from error
    except APIStatusError as error:
        if not fills_context(error):
            raise
        raise EnvironmentFault("the row does not fit into the model's context") from error
    agent.earns(step.reward, step.ended)
    return step


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
