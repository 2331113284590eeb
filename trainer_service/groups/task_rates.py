"""Measures how often the policy solves each task, and which groups the curriculum prefers.

groups that ended ─ add ─▶ TaskRate of their task ─▶ weight ─ prefers ─▶ whether a waiting group comes first
"""

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from trainer_service.algorithms.settings import CurriculumSettings, learnability, smoothed
from trainer_service.groups.assemble import Group

TASKS_KEPT = 10_000
"""How many tasks are remembered. Those whose groups ended last are kept."""


class TaskRate(msgspec.Struct, frozen=True):
    """How often a task was solved lately. Checkpoints store it."""

    task_id: str
    passed: float = 0.0
    """How many rollouts passed. Older ones count less."""
    rollouts: float = 0.0
    """How many rollouts ended, counted in the same way."""

    @property
    def pass_rate(self) -> float:
        return smoothed(self.passed, self.rollouts)

    @property
    def weight(self) -> float:
        return learnability(self.pass_rate)

    def plus(self, passes: bool, memory: int) -> "TaskRate":
        """The rate after one more rollout, when each earlier one counts 1/`memory` less than before."""
        kept = 1 - 1 / memory
        return TaskRate(self.task_id, kept * self.passed + passes, kept * self.rollouts + 1)


class TaskRates:
    """The rates of the tasks whose groups ended last. Without `settings` there is no curriculum, and no rate
    is kept."""

    def __init__(self, settings: CurriculumSettings | None, rates: Iterable[TaskRate] = ()) -> None:
        self._settings = settings
        self._rates = {each.task_id: each for each in rates} if settings else {}

    @property
    def state(self) -> list[TaskRate]:
        """The task whose group ended last comes last."""
        return list(self._rates.values())

    def add(self, groups: Iterable[Group]) -> None:
        """Count the rollouts of groups that have ended, trained or not."""
        if self._settings is None:
            return
        for group in groups:
            rewards = [m.reward for m in group.rollouts if m.evaluation is None and m.reward is not None]
            if group.task_id is None or not rewards:
                continue
            rate = self._rates.pop(group.task_id, TaskRate(group.task_id))
            for reward in rewards:
                rate = rate.plus(reward >= self._settings.pass_reward, self._settings.memory)
            self._rates[group.task_id] = rate
        for task_id in list(self._rates)[:-TASKS_KEPT]:
            del self._rates[task_id]

    def weight(self, task_id: str | None) -> float:
        """Between 0 and 1. A task of which nothing is known has 1."""
        rate = self._rates.get(task_id) if task_id is not None else None
        return 1.0 if rate is None else rate.weight

    def prefers(self, group: Group) -> bool:
        """Whether the group comes before those that are not preferred. That holds for a share of a task's
        groups as large as its weight, so that no task waits for ever."""
        return self._settings is None or lot(group.name) < self.weight(group.task_id)


def lot(name: str) -> float:
    """A number in [0, 1) that depends on the name alone: a group keeps it while it waits, also over a
    restart."""
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest()) / 2**48
