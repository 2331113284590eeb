"""One run: draws tasks, plays a group of episodes of each, and ends when it has enough.

task order ──▶ group of episodes ──▶ sessions at the gateway ──▶ outcome ──▶ journal
     ▲                                                              │
     └───────────────── which tasks still teach something ◀─────────┘
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.episodes.episode import EpisodePlayer
from environments.episodes.seats import SeatPlan
from environments.errors import EnvironmentFault, RunStopped
from environments.results.journal import EpisodeEnded, GroupBegun, Journal
from environments.runs.evaluations import EvaluationSchedule
from environments.runs.figures import RunFigures
from environments.runs.group import EpisodeGroup
from environments.runs.task_order import TaskOrder
from environments.session_client import pause_after
from environments.settings import RunSettings
from environments.task import Task
from rollout_queue import clock

logger = logging.getLogger(__name__)

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
