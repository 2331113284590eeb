"""Errands, a tool task of four calls: a reward for each call against one reward for the episode."""

import asyncio
import itertools
import json
from pathlib import Path
from random import Random
from typing import Any

from environments.settings import RunSettings
from environments.start_run import RunPlace, source_of
from results.environments.errands import CALLS, ITEMS, Errands, asked_for
from results.experiment import Experiment, Variant
from results.warm_starts import Conversation, WarmStart, made_by
from weir.demo.student import CHAT_TEMPLATE

ENVIRONMENT = "python:results.environments.errands:Errands"
KNOWN = 1024
TURNS: dict[str, Any] = {
    "trainer": {"critic": {}, "algorithm": {"advantage": {"name": "turn_gae", "gamma": 0}}}
}
EPISODE: dict[str, Any] = {
    "trainer": {"critic": {}, "algorithm": {"advantage": {"name": "turn_gae", "gamma": 1}}}
}
BY_EPISODE = {"options": {"credit": "episode"}}


def warm_start() -> WarmStart:
    tools, draw, header = asyncio.run(_tools()), Random(0), CHAT_TEMPLATE.replace("\\n", "\n")
    asked = [each["items"] for each in itertools.islice(Errands().tasks(1), KNOWN)]
    return WarmStart(
        # The template's own words again and again, so that few tokens are enough for them.
        texts=[*map(asked_for, asked), *[header, json.dumps(tools), *map(call, ITEMS)] * KNOWN, "ok"],
        right=[errand(items, items, tools) for items in asked],
        wrong=[errand(items, "".join(draw.choices(ITEMS, k=CALLS)), tools) for items in asked],
        steps=200,
        batch=16,
    )


async def _tools() -> tuple[dict[str, Any], ...]:
    """The tools as the runner offers them."""
    source: Any = source_of(RunSettings(environment=ENVIRONMENT), RunPlace(Path(), "", None))
    async with source:
        return tuple(source.description.tools)


def errand(items: str, fetched: str, tools: tuple[dict[str, Any], ...]) -> Conversation:
    first = [{"role": "user", "content": asked_for(items)}]
    then = [{"role": "tool", "content": "ok"}]
    return Conversation([first, *[then] * (CALLS - 1)], [call(each) for each in fetched], tools)


def call(item: str) -> str:
    """A tool call as the model's chat template writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'fetch', 'arguments': {'item': item}})}\n</tool_call>"


ERRANDS = Experiment(
    name="errands",
    question="Fetch four items with a tool, in the order asked for; each right call is worth a quarter. How "
    "much faster does a model learn if each call has its own reward?",
    warm_start="200 steps of supervised learning on right calls, then 40 steps in which seven of ten errands "
    "fetch anything",
    model=made_by("errands", warm_start),
    run={
        "environment": ENVIRONMENT,
        "sampling": {"max_tokens": 32},
        "episodes": 512,
        "concurrency": 48,
    },
    target=0.35,
    variants={
        "turns": Variant("a reward for each call; `turn_gae` with `gamma: 0` and a critic", services=TURNS),
        "episode": Variant(
            "the sum at the end; `turn_gae` with `gamma: 1` and a critic", services=EPISODE, run=BY_EPISODE
        ),
    },
    judged={"tasks": 192, "group_size": 1},
    found="With a reward for each call, the model reaches the target after a tenth fewer episodes, and is "
    "0.06 better at the end in the mean of the seeds; in one of the three seeds it is not.",
)
