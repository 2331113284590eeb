"""Countdown, after rLLM's example: synchronous against asynchronous training, and the size of groups."""

from random import Random
from typing import Any

from results.environments.countdown import OPERATIONS, Puzzle, puzzles
from results.experiment import Experiment, Variant
from results.warm_starts import WarmStart, made_by, one_answer

SYNCHRONOUS: dict[str, Any] = {
    "gateway": {"limits": {"staleness_versions": 0}, "poll_every_s": 0.1},
    "trainer": {"algorithm": {"max_staleness": 0, "stale": "wait"}},
}
"""The trainer waits for every rollout of its step, and the gateway admits only those of the next step."""

TWO_OLD: dict[str, Any] = {
    "gateway": {"limits": {"staleness_versions": 2}},
    "trainer": {"algorithm": {"max_staleness": 2}},
}


def warm_start() -> WarmStart:
    known, draw = puzzles(held_out=False), Random(0)
    texts = [f"{each.question} {each.expression}" for each in (*known, *puzzles(held_out=True))]
    return WarmStart(
        texts=texts,
        right=[one_answer(each.question, each.expression) for each in known],
        wrong=[one_answer(each.question, any_expression(each, draw)) for each in known for _ in range(8)],
        steps=300,
    )


def any_expression(puzzle: Puzzle, draw: Random) -> str:
    """An expression of the puzzle's numbers, whatever its value."""
    a, b, c = draw.sample(puzzle.numbers, 3)
    return f"{a}{draw.choice(OPERATIONS)}{b}{draw.choice(OPERATIONS)}{c}"


COUNTDOWN = Experiment(
    name="countdown",
    question="Make a number of three others. Does asynchronous training reach the reward of synchronous "
    "training, with how many episodes and how much time? Does the size of groups matter?",
    warm_start="300 steps of supervised learning on one solution of each of 293 puzzles, then 40 steps in "
    "which seven of ten answers are any expression of the puzzle's numbers. So the model has learned the "
    "arithmetic, and rarely uses it",
    model=made_by("countdown", warm_start),
    run={
        "environment": "python:results.environments.countdown:Countdown",
        "tasks": 10_000,
        "sampling": {"max_tokens": 12},
        "episodes": 2048,
        "concurrency": 64,
    },
    target=0.25,
    variants={
        "async": Variant("rollouts up to eight versions old"),
        "two-old": Variant("rollouts at most two versions old", services=TWO_OLD),
        "sync": Variant("rollouts of the trainer's own version only", services=SYNCHRONOUS),
        "twice": Variant(
            "as async, but each rollout is trained twice", services={"trainer": {"algorithm": {"epochs": 2}}}
        ),
        "groups-of-16": Variant(
            "as async, with 16 episodes of a puzzle instead of 8", run={"group_size": 16}
        ),
    },
    judged={"group_size": 1},
    judged_on="all 293 puzzles",
    found="The age of rollouts hardly matters: at most 0, 2 and 8 versions old, they reach the target after "
    "1363, 1176 and 1349 episodes. Synchronous training takes more than twice the time and a third more"
    " CPU time: engine and trainer wait for each other in turn. Groups of 16 cost least. If each "
    "rollout is trained twice, the target comes after a third fewer episodes, and the end is the same. "
    "TRL takes an eighth of the CPU time: with so small a model, most of Weir's is that of services, of"
    " HTTP and of records.",
    trl_batch=64,
)
