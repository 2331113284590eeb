"""Which task comes next: new ones without end, or a set in a new order each time, without those that teach
nothing."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from environments.environment import Task, TaskSource
from environments.errors import RunStopped

AHEAD = 64
"""How many tasks are asked for at once."""


@dataclass
class TaskOrder:
    """`size` is the number of tasks; 0 means no end. `visit` counts what was drawn, and is where a run
    resumes.

    With `skip_after` k, a task whose last k groups had equal rewards is left out the next k times; then it is
    tried again, because the model has changed.
    """

    source: TaskSource
    seed: int
    size: int
    skip_after: int = 0
    once: bool = False
    visit: int = 0
    skipped: int = 0
    _known: dict[int, Task] = field(default_factory=dict)
    _uniform: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _left_out: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _order: tuple[int, list[int]] = (-1, [])

    async def next(self) -> tuple[int, Task] | None:
        """The next visit and its task; None after the last one. Endless where every task is left out but
        tried again in turn. Raises RunStopped if there are fewer tasks than `size`."""
        while not (self.once and self.size and self.visit >= self.size):
            visit, self.visit = self.visit, self.visit + 1
            task = await self._task(self._number(visit))
            if task is None and self.size and not self.once:
                raise RunStopped(f"the environment has fewer than {self.size} tasks")
            if task is None:
                return None
            if not self._leaves_out(task.id):
                return visit, task
            self.skipped += 1
        return None

    async def at(self, visit: int) -> Task:
        """The task of an earlier visit."""
        task = await self._task(self._number(visit))
        if task is None:
            raise LookupError(f"there is no task of visit {visit}")
        return task

    def saw(self, task_id: str, rewards: Sequence[float]) -> None:
        """Remember whether the rewards of a task's group differed."""
        if len(rewards) < 2 or len(set(rewards)) > 1:
            self._uniform.pop(task_id, None)
        elif self.size and self.skip_after:
            self._uniform[task_id] += 1

    def _leaves_out(self, task_id: str) -> bool:
        if not self.skip_after or self._uniform.get(task_id, 0) < self.skip_after:
            return False
        self._left_out[task_id] += 1
        if self._left_out[task_id] > self.skip_after:
            self._left_out.pop(task_id)
            self._uniform[task_id] = self.skip_after - 1
            return False
        return True

    def _number(self, visit: int) -> int:
        if not self.size:
            return visit
        round_number, place = divmod(visit, self.size)
        if self.once:
            return place
        if self._order[0] != round_number:
            order = list(range(self.size))
            Random(f"{self.seed}/{round_number}").shuffle(order)
            self._order = round_number, order
        return self._order[1][place]

    async def _task(self, number: int) -> Task | None:
        if number not in self._known:
            if not self.size:  # an old one does not come again
                self._known.clear()
            start = number // AHEAD * AHEAD
            count = min(AHEAD, self.size - start) if self.size else AHEAD
            for place, task in enumerate(await self.source.tasks(self.seed, start, count), start):
                self._known[place] = task
        return self._known.get(number)
