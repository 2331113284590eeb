"""What a run of training may be about: the demo's tool, that tool slow now and then, the guessing game."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from openai import AsyncOpenAI

from weir.demo.agent import MAX_CALLS, solve
from weir.demo.game import Game, ToolGame
from weir.demo.guess import GuessGame
from weir.demo.guess_plan import write_guess_plan
from weir.demo.plan import write_plan
from weir.demo.task import Task, draw

SIGMA = 1.0
MEDIAN_S = math.exp(-(SIGMA**2) / 2)
"""Of a tool's log-normal time, for a mean of a second; one call in a hundred takes six."""
LONGEST_S = 10.0


@dataclass(frozen=True)
class Kind:
    """A game, and the warm start of the model that plays it."""

    model: str
    """Names its models in the cache."""
    plan: Callable[[Path], None]
    game: Game[Any]
    measured: Game[Any]
    """The same for evaluations, where time teaches nothing."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """What its conversations need."""


class SlowToolGame:
    """The demo's game with a slow tool. Its times are drawn with the task: the same in each run of a seed."""

    def group(self, random: Random, size: int) -> Sequence[tuple[Task, tuple[float, ...]]]:
        task = draw(random)
        return [(task, tuple(takes_s(random) for _ in range(MAX_CALLS))) for _ in range(size)]

    def task_id(self, task: tuple[Task, tuple[float, ...]]) -> str:
        return f"value-of-{task[0].key}"

    async def play(self, client: AsyncOpenAI, task: tuple[Task, tuple[float, ...]]) -> float:
        return task[0].reward(await solve(client, *task))


def takes_s(random: Random) -> float:
    """Seconds of one tool call: most are short, and a few make up much of the time."""
    return min(LONGEST_S, random.lognormvariate(math.log(MEDIAN_S), SIGMA))


KINDS = {
    "tool": Kind("tool", write_plan, ToolGame(), ToolGame()),
    "slow": Kind("tool", write_plan, SlowToolGame(), ToolGame()),
    # Past thoughts stay, so that each hint extends the conversation: a session is one row, however long.
    "guess": Kind("guess", write_guess_plan, GuessGame(), GuessGame(), {"thinking": "all"}),
}
