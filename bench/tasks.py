"""The tasks that benchmarks train on: the demo's tool, the same tool with slow calls, and a guessing game."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from openai import AsyncOpenAI

from bench.guess import GuessGame, write_guess_plan
from weir.demo.student import write_plan
from weir.demo.task import MAX_CALLS, Game, ToolGame, ToolTask, draw, solve

SIGMA = 1.0
MEDIAN_S = math.exp(-(SIGMA**2) / 2)
"""The median of a slow tool's log-normal time, whose mean is one second. One call in a hundred takes six
seconds or more."""
LONGEST_S = 10.0


@dataclass(frozen=True)
class TrainingTask:
    """A game, and the warm start of the model that plays it."""

    model: str
    """The name under which its warm-started models are cached."""
    plan: Callable[[Path], None]
    game: Game[Any]
    measured: Game[Any]
    """The game in evaluations, where tools are never slow."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the gateway that the game's conversations need."""


class SlowToolGame:
    """The demo's game with a slow tool. The times are drawn with the task, and so depend only on the seed."""

    def group(self, random: Random, size: int) -> Sequence[tuple[ToolTask, tuple[float, ...]]]:
        task = draw(random)
        return [(task, tuple(takes_s(random) for _ in range(MAX_CALLS))) for _ in range(size)]

    def task_id(self, task: tuple[ToolTask, tuple[float, ...]]) -> str:
        return f"value-of-{task[0].key}"

    async def play(self, client: AsyncOpenAI, task: tuple[ToolTask, tuple[float, ...]]) -> float:
        return task[0].reward(await solve(client, *task))


def takes_s(random: Random) -> float:
    """The seconds of one tool call: most calls are short, and a few take much of the total time."""
    return min(LONGEST_S, random.lognormvariate(math.log(MEDIAN_S), SIGMA))


TASKS = {
    "tool": TrainingTask("tool", write_plan, ToolGame(), ToolGame()),
    "slow": TrainingTask("tool", write_plan, SlowToolGame(), ToolGame()),
    # If the gateway keeps all thinking, each hint extends the conversation, and so a session is a single row.
    "guess": TrainingTask("guess", write_guess_plan, GuessGame(), GuessGame(), {"thinking": "all"}),
}
