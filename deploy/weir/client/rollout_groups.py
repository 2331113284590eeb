"""A user's function as an episode, groups of its episodes from which the model learns, and evaluations.

task ──▶ n sessions ──▶ function(session, task) ──▶ rewards ──▶ the sessions end ──▶ AgentRun: a curve
"""

import asyncio
import functools
import inspect
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Generic, TypedDict, TypeVar, Unpack, cast

from weir.client.agent_sessions import (
    AgentSession,
    EpisodeEnding,
    GatewayRequests,
    GivenGateway,
    end_sessions,
    ending_after,
    group,
    in_background,
    open_sessions,
    session,
)
from weir.shared import RunStopped, SessionRefused, clock, id_of, mean_interval
from weir.words import curve

TaskT = TypeVar("TaskT")
Played = TypeVar("Played")
WINDOW = 16  # groups whose mean reward is shown
MOST_FAILED_GROUPS = 5  # in a row; with so many in which every episode failed, the run ends
SPARE_S = 120.0  # how much longer than an episode its session may last


class RolloutFunction(Generic[TaskT, Played]):
    """An episode of `function(session, task)`, which returns the reward. Called with a task, it opens a
    session, plays, and ends it. With `graded_elsewhere`, an episode without a reward waits for one."""

    def __init__(self, function: Callable[[Any, TaskT], Played], *, graded_elsewhere: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.function, self._graded_elsewhere = function, graded_elsewhere
        self.is_async = inspect.iscoroutinefunction(function)

    def __call__(self, task: TaskT, **session_fields: Any) -> Played:
        """What the function returns."""
        play: Any = self._play_async if self.is_async else self._play
        return cast(Played, play(task, session(id_of(task), **session_fields)))

    def _play(self, task: TaskT, block: Any) -> Any:
        with block as opened:
            reward = self.function(opened, task)
            if opened.verdict is None:
                opened.finish(*self.ending(reward, opened))
            return reward

    async def _play_async(self, task: TaskT, block: Any) -> Any:
        async with block as opened:
            reward = await cast(Any, self.function(opened, task))
            if opened.verdict is None:
                await opened.afinish(*self.ending(reward, opened))
            return reward

    def ending(self, reward: Any, played: AgentSession) -> EpisodeEnding:
        """How an episode ends whose function has returned. A missing reward is not 0: it is an error."""
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the reward {reward} is not finite")
        if reward is None and played.total is None and played.verdict is None and not self._graded_elsewhere:
            raise ValueError("the function has neither returned a reward nor called `reward`")
        return EpisodeEnding("completed", None if reward is None else float(reward))


rollout = RolloutFunction
Agent = RolloutFunction[TaskT, Any] | Callable[[Any, TaskT], Any]


@dataclass
class AgentRun:
    """What the episodes of a run came to."""

    groups: list[tuple[str, list[float]]] = field(default_factory=list)
    """The task and the rewards of each group, in the order in which they ended."""
    failed: int = 0
    error: Exception | None = None
    versions: list[int] = field(default_factory=list)
    """The policy version that answered at the beginning, and after each group."""
    notice: str | None = None
    """What whoever trains the model should know: that the training is paused, or went back."""

    @property
    def means(self) -> list[float]:
        """The mean reward of each group that has rewards."""
        return [fmean(rewards) for _, rewards in self.groups if rewards]

    def interval(self) -> tuple[float, float, float]:
        """The mean over tasks of the mean reward of each, and its 95 % interval."""
        by_task: defaultdict[str, list[float]] = defaultdict(list)
        for task, rewards in self.groups:
            by_task[task] += rewards
        return mean_interval({task: rewards for task, rewards in by_task.items() if rewards})

    def __str__(self) -> str:
        means, compared = self.means, [each for _, each in self.groups if len(each) > 1]
        said = [f"{len(self.groups)} groups"]
        said += [f"{sum(min(each) < max(each) for each in compared)} with different rewards"] * bool(compared)
        said += [f"version {self.versions[0]} → {self.versions[-1]}"]
        if means:
            said.append(f"reward {fmean(means[:WINDOW]):.3f} → {fmean(means[-WINDOW:]):.3f}")
        said += [f"{self.failed} episodes failed"] if self.failed else []
        return ", ".join([*said, self.notice] if self.notice else said)


class RunOptions(TypedDict, total=False):
    """`n` episodes of a task are compared (8; 1 in an evaluation), `concurrency` (32) run at once, each for
    `episode_s` (600) at most. `fields` are others of `POST /groups`, such as `sampling`."""

    n: int
    concurrency: int
    episode_s: float
    gateway: GivenGateway
    fields: Mapping[str, Any]


class _Player:
    """Plays groups of episodes, several at once."""

    def __init__(self, agent: Any, n: int, options: RunOptions) -> None:
        self._agent = agent if isinstance(agent, RolloutFunction) else rollout(agent)
        self._client, self._n = GatewayRequests(options.get("gateway")), options.get("n", n)
        self._episode_s, slots = options.get("episode_s", 600.0), options.get("concurrency", 32)
        self._fields = {"ttl_s": self._episode_s + SPARE_S, **options.get("fields", {})}
        self._slots, self._threads = asyncio.Semaphore(slots), ThreadPoolExecutor(slots)
        self._open: set[AgentSession] = set()
        self.run = AgentRun()

    async def play(self, tasks: Sequence[Any]) -> AgentRun:
        """Raises RunStopped, and GatewayFault. Sessions that have not ended then are abandoned."""
        self._most_failed = min(MOST_FAILED_GROUPS, len(tasks))
        try:
            await self._ask_version()
            async with asyncio.TaskGroup() as running:
                for task in tasks:
                    async with self._slots:  # a group begins once an episode has a free slot
                        body = group(task, self._n, **self._fields).body
                        opened = await open_sessions(self._client, "/groups", body)
                    self._open.update(opened)
                    episodes = [running.create_task(self._episode(each, task)) for each in opened]
                    running.create_task(self._group(id_of(task), episodes))
        except* Exception as errors:
            raise errors.exceptions[0] from self.run.error
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            await end_sessions([*self._open], asyncio.CancelledError())
            await self._client.close()
        return self.run

    async def _group(self, task: str, episodes: Sequence[asyncio.Task[float | None]]) -> None:
        rewards = [reward for each in episodes if (reward := await each) is not None]
        self.run.groups.append((task, rewards))
        last = self.run.groups[-self._most_failed :]
        if self.run.error and len(last) == self._most_failed and not any(rewards for _, rewards in last):
            raise RunStopped(f"every episode of {len(last)} groups in a row failed: {self.run.error!r}")
        await self._ask_version()
        _say(str(self.run))

    async def _ask_version(self) -> None:
        model = (await self._client.ask("GET", "/v1/models"))["data"][0]
        self.run.notice = model.get("notice")
        self.run.versions.append(model["version"])

    async def _episode(self, played: AgentSession, task: Any) -> float | None:
        """The episode's reward; None if it has none, or has failed."""
        async with self._slots:
            ending = await self._played(played, task)
        try:
            if played.verdict is None:
                await played.afinish(*ending)
        except SessionRefused as error:  # it has expired or was deleted; other episodes go on
            ending = ending_after(error)
        self._open.discard(played)
        self.run.failed += ending.status == "failed"
        return None if ending.status == "failed" else played.total

    async def _played(self, played: AgentSession, task: Any) -> EpisodeEnding:
        limit = None
        try:
            async with clock.timeout(self._episode_s) as limit:
                return self._agent.ending(await self._call(played, task), played)
        except Exception as error:
            if limit is not None and limit.expired():
                return EpisodeEnding("truncated", reason=f"it took longer than {self._episode_s:g} s")
            ending = ending_after(error)
            if ending.status == "failed":
                self.run.error = self.run.error or error
            return ending

    async def _call(self, played: AgentSession, task: Any) -> Any:
        if self._agent.is_async:
            return await self._agent.function(played, task)
        call = functools.partial(copy_context().run, self._agent.function, played, task)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _say(line: str) -> None:
    if sys.stderr.isatty():  # this takes the place of the line before
        sys.stderr.write(f"\r\x1b[2K{line}")


async def train_async(
    agent: Agent[TaskT], tasks: Sequence[TaskT], groups: int, **options: Unpack[RunOptions]
) -> AgentRun:
    """Play so many groups of episodes, each of one of the tasks, while the trainer learns from them. A
    terminal shows the progress, and a curve at the end. Raises RunStopped, and GatewayFault."""
    if not tasks:
        raise ValueError("there are no tasks to train on")
    order = [task for _ in range(-(-groups // len(tasks))) for task in random.sample(tasks, len(tasks))]
    run = await _Player(agent, 8, options).play(order[:groups])
    _say("\n".join([str(run), *curve(run.means, 60, 6), ""]))
    return run


async def evaluate_async(
    agent: Agent[TaskT], tasks: Sequence[TaskT], **options: Unpack[RunOptions]
) -> AgentRun:
    """Play each task `n` times, in sessions that are never trained; `interval()` of the run is the result."""
    options["fields"] = {"train": False, **options.get("fields", {})}
    run = await _Player(agent, 1, options).play(tasks)
    _say("reward {:.4f} [{:.4f}, {:.4f}]\n".format(*run.interval()))
    return run


train = in_background(train_async)
evaluate = in_background(evaluate_async)
