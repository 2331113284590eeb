"""One run: draws tasks, plays a group of episodes of each, evaluates the policy beside the training, and ends
when it has enough.

task order ──▶ group of episodes ──▶ sessions at the gateway ──▶ outcome ──▶ journal
     ▲                                                              │
     └───────────────── which tasks still teach something ◀─────────┘

RUN/evaluations/00012/   run.json   journal.jsonl   summary.json   reward.png   begun at version 12

One evaluation is played before the training, of one version, and after every so many new versions another
one. The figures are all that a run keeps of episodes that have ended; the journal has the rest.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments.environment import Task
from environments.episode_group import EpisodeGroup
from environments.episodes import EpisodePlayer, SeatPlan
from environments.errors import EnvironmentFault, GatewayFault, RunStopped, UnknownEnvironment
from environments.results import EpisodeEnded, GroupBegun, Journal, write_document
from environments.session_client import SessionClient, pause_after
from environments.settings import RunSettings
from environments.task_order import TaskOrder
from rollout_queue import clock


@dataclass
class RecentRewards:
    """The mean of the last 128 rewards, and of the first 128."""

    window: deque[float] = field(default_factory=lambda: deque(maxlen=128))
    first: float | None = None
    count: int = 0

    def add(self, reward: float) -> None:
        self.count += 1
        self.window.append(reward)
        if self.first is None:
            self.first = self.mean

    @property
    def mean(self) -> float | None:
        full = self.window.maxlen
        return sum(self.window) / len(self.window) if len(self.window) == full else None


@dataclass
class RewardSum:
    """The sum of some rewards, and how many they are."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def add(self, reward: float) -> None:
        self.count += 1
        self.total += reward


@dataclass
class RunFigures:
    """Its size does not depend on the number of episodes."""

    ended: int = 0
    failed: int = 0
    last_session: str = ""
    """The session of the episode that ended last."""
    recent: RecentRewards = field(default_factory=RecentRewards)
    groups: int = 0
    """Groups that have ended in this process with two rewards or more; the others cannot be compared."""
    different: int = 0
    """Those whose rewards differ."""
    _fresh: RewardSum = field(default_factory=RewardSum)

    def add(self, entry: EpisodeEnded) -> None:
        """Count an episode that has ended."""
        self.ended += 1
        self.failed += entry.status == "failed"
        self.last_session = entry.session_id
        if entry.reward is not None and entry.status != "failed":
            self.recent.add(entry.reward)
            self._fresh.add(entry.reward)

    def add_group(self, rewards: Sequence[float]) -> None:
        """Count a group that has ended."""
        self.groups += len(rewards) > 1
        self.different += len(set(rewards)) > 1

    def take_fresh(self) -> RewardSum:
        """The rewards since this was called last."""
        fresh, self._fresh = self._fresh, RewardSum()
        return fresh


logger = logging.getLogger(__name__)

Judge = Callable[[Path, bool], Awaitable[dict[str, Any]]]
"""Plays an evaluation in a directory, of the version that the directory names alone if the flag is set. It
goes on with the one that is there. Returns its summary."""


@dataclass
class EvaluationSchedule:
    """One evaluation at a time. What comes due meanwhile begins after it, with the version of that moment.

    The first one is played before the training has an episode, which could make a new version meanwhile, and
    all its calls are pinned to its version, which others may train."""

    gateway: SessionClient
    directory: Path
    every: int
    judge: Judge
    running: bool = False

    async def before(self) -> Path | None:
        """The directory of the evaluation that comes before the training, unless it has been played. Raises
        GatewayFault."""
        begun = self._begun()
        if begun:
            return begun[0] if len(begun) == 1 and not _has_ended(begun[0]) else None
        version = await self.gateway.served_version()
        return None if version is None else self.directory / f"{version:05d}"

    async def due(self, session_id: str) -> Path | None:
        """The directory of an evaluation that is to begin now; `session_id` is one of the training, and says
        which version answers. An evaluation that a killed runner left comes first. Raises GatewayFault."""
        if self.running:
            return None
        begun = self._begun()
        if begun and not _has_ended(begun[-1]):
            found = begun[-1]
        else:
            version = await self.gateway.newest_version(session_id)
            if self.running or version is None or (begun and version < int(begun[-1].name) + self.every):
                return None
            found = self.directory / f"{version:05d}"
        self.running = True
        return found

    async def play(self, directory: Path, pinned: bool = False) -> None:
        """Play it. One that cannot be played is told, and the training goes on."""
        self.running = True
        try:
            await self.judge(directory, pinned)
        except (EnvironmentFault, GatewayFault, RunStopped, UnknownEnvironment) as error:
            logger.warning("the evaluation in %s ended early: %s", directory, error)
            write_document(directory / "summary.json", {"error": str(error)})
        finally:
            self.running = False

    def _begun(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9]*"))


def _has_ended(directory: Path) -> bool:
    return (directory / "summary.json").exists()


def evaluations_in(directory: Path) -> list[dict[str, Any]]:
    """What the evaluations of a run have found, by version: the mean reward with its interval, and which
    versions sampled how many episodes."""
    found: list[dict[str, Any]] = []
    for path in sorted(directory.glob("[0-9]*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        told = {name: summary[name] for name in ("reward", "versions", "error") if name in summary}
        found.append({"version": int(path.parent.name), **told})
    return found


STOPS_WITHIN_S = 10.0
"""How long a run that stops repeats requests that end its sessions. They expire without it, too."""


@dataclass
class Run:
    """`unfinished` are the groups that an earlier process began, with the members that it did not end."""

    settings: RunSettings
    order: TaskOrder
    player: EpisodePlayer
    plan: SeatPlan
    journal: Journal
    slots: asyncio.Semaphore
    """Who plays an episode holds one; the evaluations of the run share them."""
    unfinished: Sequence[GroupBegun] = ()
    next_group: int = 0
    begun: int = 0
    """Episodes that were begun, those of an earlier process too."""
    figures: RunFigures = field(default_factory=RunFigures)
    evaluations: EvaluationSchedule | None = None
    _playing: dict[int, EpisodeGroup] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _failed_groups: list[str] = field(default_factory=list)
    _started_at: float = field(default_factory=clock.monotonic)

    async def play(self) -> None:
        """Play until the run has enough. Raises RunStopped, and GatewayFault if the gateway does not serve
        it."""
        try:
            async with asyncio.TaskGroup() as groups:
                try:
                    # Who stops the run is heard here at once, also while sessions are opened.
                    await asyncio.wait([groups.create_task(self._play_all(groups))])
                except BaseException:
                    self.player.patience.ends_in(STOPS_WITHIN_S)
                    raise
        except* (RunStopped, Exception) as errors:
            raise errors.exceptions[0] from None
        finally:
            await asyncio.gather(*(group.abandon(self.player) for group in self._playing.values()))

    async def _play_all(self, groups: asyncio.TaskGroup) -> None:
        if self.evaluations and (before := await self.evaluations.before()):
            await self.evaluations.play(before, pinned=True)
        await self._begin_all(groups)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _begin_all(self, groups: asyncio.TaskGroup) -> None:
        for begun in self.unfinished:
            await self._begin(groups, begun, await self._task_of(begun))
        while (drawn := await self._next()) is not None:
            if failed := len(self._failed_groups):
                # an environment that is gone may come back, and its sessions cost the gateway work
                await clock.sleep(pause_after(failed))
            visit, task = drawn
            begun = GroupBegun(self.next_group, visit, task.id, tuple(range(self.settings.group_size)))
            self.next_group += 1
            await self._begin(groups, begun, task)

    async def _task_of(self, begun: GroupBegun) -> Task:
        try:
            return await self.order.at(begun.visit)
        except (EnvironmentFault, LookupError) as error:
            raise RunStopped(f"the environment does not give the task of an earlier group: {error}") from None

    def enough(self) -> bool:
        """Whether no further group begins."""
        wanted = self.settings.until_reward
        learned = wanted is not None and (self.figures.recent.mean or 0) >= wanted
        played = self.settings.episodes is not None and self.begun >= self.settings.episodes
        limit_s = self.settings.time_limit_s
        return learned or played or (limit_s is not None and clock.monotonic() - self._started_at > limit_s)

    async def _next(self) -> tuple[int, Task] | None:
        """Raises RunStopped if the environment gives no tasks."""
        try:
            return None if self.enough() else await self.order.next()
        except EnvironmentFault as error:
            raise RunStopped(f"the environment gives no tasks: {error}") from None

    async def _begin(self, groups: asyncio.TaskGroup, begun: GroupBegun, task: Task) -> None:
        """Begin a group once an episode has a free slot: its sessions are opened before the next one
        begins."""
        await self.slots.acquire()
        self.slots.release()
        self.begun += len(begun.members)
        self.journal.add(begun)
        group = EpisodeGroup(
            begun.group,
            task,
            begun.members,
            begun.attempt,
            trains=self.settings.mode == "train",
            stop_uniform_after=self.settings.stop_uniform_after,
        )
        self._playing[begun.group] = group
        await group.open(self.player, self.plan)
        self._add(groups, self._play(groups, group))

    async def _play(self, groups: asyncio.TaskGroup, group: EpisodeGroup) -> None:
        await group.play(self.player, self.slots, self._record)
        del self._playing[group.number]
        self.order.saw(group.task.id, group.rewards)
        self.figures.add_group(group.rewards)
        self._watch_failures(group)
        if self.evaluations and (due := await self.evaluations.due(self.figures.last_session)):
            self._add(groups, self.evaluations.play(due))

    def _add(self, groups: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
        task = groups.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self, entry: EpisodeEnded) -> None:
        self.journal.add(entry)
        self.figures.add(entry)
        if entry.status == "failed":
            logger.warning("episode %s failed: %s", entry.session_id, entry.reason)

    def _watch_failures(self, group: EpisodeGroup) -> None:
        """Raises RunStopped when every episode of several groups in a row has failed."""
        if group.rewards or not group.failures:
            self._failed_groups.clear()
            return
        self._failed_groups.append(group.failures[0])
        if len(self._failed_groups) >= self.settings.most_failed_groups:
            raise RunStopped(
                f"every episode of {len(self._failed_groups)} groups in a row failed; the first error was: "
                f"{self._failed_groups[0]}"
            )


EVERY_S = 5.0
FEWEST_GROUPS = 3
"""After so many groups without different rewards, the run says what helps."""
ADVICE = (
    "A group whose rewards are equal teaches nothing. If all its episodes fail, an example in the prompt, "
    "`-s temperature=0.6` or an easier task helps; if all succeed, a harder one."
)


Notice = Callable[[], Awaitable[str | None]]
"""Asks the gateway what whoever trains the model should know."""


class ToldProgress:
    """What a run says. The advice comes once."""

    def __init__(self, run: Run, say: Callable[[str], None], notice: Notice) -> None:
        self._run, self._say, self._notice, self._advised = run, say, notice, False

    async def tell(self) -> None:
        notice = await self._notice() if self._run.settings.mode == "train" else None
        self._say(sentence(self._run) + (f"; {notice}" if notice else ""))
        figures = self._run.figures
        if teaches_nothing(self._run) and figures.groups >= FEWEST_GROUPS and not self._advised:
            self._say(ADVICE)
            self._advised = True


@asynccontextmanager
async def telling(run: Run, say: Callable[[str], None], notice: Notice) -> AsyncIterator[None]:
    """Say it while the block runs, and at its end."""
    progress = ToldProgress(run, say, notice)
    task = asyncio.create_task(_tell(progress))
    try:
        yield
        await progress.tell()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(progress: ToldProgress) -> None:
    while True:
        await clock.sleep(EVERY_S)
        await progress.tell()


def teaches_nothing(run: Run) -> bool:
    """Whether groups were compared, and none had different rewards."""
    return run.settings.mode == "train" and run.figures.groups > 0 and not run.figures.different


def sentence(run: Run) -> str:
    figures, mean = run.figures, run.figures.recent.mean
    so_far = "" if mean is None else f", mean reward of the last 128: {mean:.3f}"
    trouble = f", {figures.failed} failed" if figures.failed else ""
    skipped = f", {run.order.skipped} tasks left out" if run.order.skipped else ""
    judging = ", an evaluation runs" if run.evaluations and run.evaluations.running else ""
    return f"{figures.ended} episodes{so_far}{trouble}{skipped}{judging}{_groups(run)}"


def _groups(run: Run) -> str:
    figures = run.figures
    if teaches_nothing(run):
        return f", 0 of {figures.groups} groups have different rewards, so nothing is trained"
    if run.settings.mode == "train" and figures.groups:
        return f", {figures.different} of {figures.groups} groups had different rewards"
    return ""
