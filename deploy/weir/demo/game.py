"""What the episodes play: tasks by the group, and an agent that turns a task and a client into a reward."""

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

from openai import AsyncOpenAI

from weir.demo.agent import solve
from weir.demo.task import Task, draw

Drawn = TypeVar("Drawn")


class Game(Protocol[Drawn]):
    """One kind of episode. All chance of its tasks comes from the `random` that it is given."""

    def group(self, random: Random, size: int) -> Sequence[Drawn]:
        """The tasks of one group, one for each member: the same question for all of them."""

    def task_id(self, task: Drawn) -> str:
        """Names the question in the records."""

    async def play(self, client: AsyncOpenAI, task: Drawn) -> float:
        """One episode; its reward. Raises OpenAIError when a call failed."""


class ToolGame:
    """The demo's: a value that only the tool knows."""

    def group(self, random: Random, size: int) -> Sequence[Task]:
        return [draw(random)] * size

    def task_id(self, task: Task) -> str:
        return f"value-of-{task.key}"

    async def play(self, client: AsyncOpenAI, task: Task) -> float:
        return task.reward(await solve(client, task))
