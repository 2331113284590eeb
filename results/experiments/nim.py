"""Nim of TextArena: learning against one's frozen first self, and by playing with oneself."""

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

from environments.environment import EnvironmentSource
from environments.settings import RunSettings
from environments.start_run import RunPlace, source_of
from results.experiment import Experiment, Variant
from results.warm_starts import Conversation, Message, WarmStart, made_by

ENVIRONMENT, OPTIONS = "textarena:Nim-v0-raw", {"piles": [3, 4]}
GAMES = 400
PILE = re.compile(r"pile (\d+): (\d+)")
FIRST = "policy@0"


def warm_start() -> WarmStart:
    conversations = asyncio.run(_random_games())
    told = [each["content"] for game in conversations for heard in game.heard for each in heard]
    said = [text for game in conversations for text in game.said]
    return WarmStart(texts=[*told, *said], right=conversations, wrong=conversations, steps=150, wrong_steps=0)


async def _random_games() -> list[Conversation]:
    """What both players heard and said in games of random moves, as the library plays them."""
    draw = Random(0)
    settings = RunSettings(environment=ENVIRONMENT, options=OPTIONS)
    source: Any = source_of(settings, RunPlace(Path(), "", None))
    async with source:
        tasks = await source.tasks(0, 0, GAMES)
        return [side for task in tasks for side in await _game(source, task, draw)]


async def _game(source: EnvironmentSource, task: Any, draw: Random) -> list[Conversation]:
    heard: tuple[list[list[Message]], ...] = ([], [])
    said: tuple[list[str], ...] = ([], [])
    environment = source.environment()
    step = await environment.reset(task)
    while not step.ended:
        heard[step.player].append(list(step.messages))
        move = _random_move(str(step.messages[-1]["content"]), draw)
        said[step.player].append(move)
        step = await environment.step(move)
    await environment.close()
    return [Conversation(*side) for side in zip(heard, said, strict=True) if side[1]]


def _random_move(told: str, draw: Random) -> str:
    """A legal move after the last two piles that the player read of."""
    piles = [(pile, int(size)) for pile, size in PILE.findall(told)[-2:] if int(size)]
    pile, size = draw.choice(piles)
    return f"[{pile} {draw.randint(1, size)}]"


NIM = Experiment(
    name="nim",
    question="Nim with piles of 3 and 4, by TextArena: who takes the last one wins 1, the other -1. Does a "
    "model learn to beat its first self by playing against it? Does it learn as much by playing with itself?",
    warm_start="150 steps of supervised learning on 400 games of random moves: it knows the rules",
    model=made_by("nim", warm_start),
    run={
        "environment": ENVIRONMENT,
        "options": OPTIONS,
        "sampling": {"max_tokens": 12},
        "episodes": 1024,
        "concurrency": 48,
    },
    target=0.25,
    variants={
        "frozen-self": Variant(
            "the opponent is the first model, in each seat in turn", run={"opponent": FIRST}
        ),
        "self-play": Variant("both players are the model that learns"),
    },
    judged={"opponent": FIRST, "tasks": 256, "group_size": 1},
    judged_on="games against the first model",
    against_first=True,
    found="Against its frozen self a model learns reliably; by playing with itself it learns less, and with "
    "more variance between seeds. The mean reward of self-play is 0 by its nature, so its curve shows "
    "nothing. A game of self-play is two episodes, one for each player.",
)
