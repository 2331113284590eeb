"""The protocol of a game: it draws the tasks of a group, plays an episode of a task, and rewards it."""

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

from openai import AsyncOpenAI

from weir.demo.agent import solve
from weir.demo.task import ToolTask, draw

GameTask = TypeVar("GameTask")


class Game(Protocol[GameTask]):
    """One kind of episode. The tasks of a game depend only on `random`."""

    def group(self, random: Random, size: int) -> Sequence[GameTask]:
        """The tasks of one group, one for each member; all have the same question."""

    def task_id(self, task: GameTask) -> str:
        """The id of the question in recorded data."""

    async def play(self, client: AsyncOpenAI, task: GameTask) -> float:
        """Play one episode and return its reward. Raises OpenAIError when a call failed."""


class ToolGame:
    """The demo's game: a question about a value that only the tool knows."""

    def group(self, random: Random, size: int) -> Sequence[ToolTask]:
        return [draw(random)] * size

    def task_id(self, task: ToolTask) -> str:
        return f"value-of-{task.key}"

    async def play(self, client: AsyncOpenAI, task: ToolTask) -> float:
        return task.reward(await solve(client, task))
