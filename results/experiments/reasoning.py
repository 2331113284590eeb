"""Two tasks of reasoning-gym, with and without a curriculum: tasks that teach nothing are left out."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from environments.settings import RunSettings
from environments.start_run import RunPlace, source_of
from results.experiment import Experiment, Variant
from results.warm_starts import WarmStart, made_by, one_answer

TASKS = 48
CURRICULUM = {"skip_after": 1, "stop_uniform_after": 4}
VARIANTS = {
    "curriculum": Variant(
        "a task whose last group had equal rewards is left out once, and a group ends when four of its "
        "episodes have the same reward",
        run=CURRICULUM,
    ),
    "all-tasks": Variant("every task is played in each round, with all its episodes"),
}


class Question(NamedTuple):
    text: str
    answer: str


def questions_of(environment: str, options: Mapping[str, Any], count: int) -> list[Question]:
    """Questions of the library, each once, with the answers that it gives."""

    async def asked() -> list[Question]:
        settings = RunSettings(environment=environment, options=dict(options))
        async with source_of(settings, RunPlace(Path(), "", None)) as source:
            tasks = await source.tasks(0, 0, count)
        return sorted({Question(str(each.data["question"]), str(each.data["answer"])) for each in tasks})

    return asyncio.run(asked())


def warm_start_of(environment: str, options: Mapping[str, Any], steps: int) -> Callable[[], WarmStart]:
    """A wrong answer is the right one of another question."""

    def warm_start() -> WarmStart:
        questions, draw = questions_of(environment, options, 1024), Random(0)
        return WarmStart(
            texts=[f"{each.text} {each.answer}" for each in questions],
            right=[one_answer(each.text, each.answer) for each in questions],
            wrong=[one_answer(each.text, draw.choice(questions).answer) for each in questions * 8],
            steps=steps,
        )

    return warm_start


def experiment(
    name: str, options: Mapping[str, Any], steps: int, about: str, most_tokens: int, target: float, found: str
) -> Experiment:
    environment = f"reasoning_gym:{name}"
    return Experiment(
        name=name,
        question=f"{about} How much does a curriculum save?",
        warm_start=f"{steps} steps of supervised learning on right answers, then 40 steps in which seven of "
        "ten answers are those of other questions",
        model=made_by(name, warm_start_of(environment, options, steps)),
        run={
            "environment": environment,
            "options": options,
            "tasks": TASKS,
            "sampling": {"max_tokens": most_tokens},
            "episodes": 1536,
            "concurrency": 64,
        },
        target=target,
        found=found,
        variants=VARIANTS,
        judged={"tasks": 256, "group_size": 1},
        trl_batch=64,
    )


CHAIN_SUM = experiment(
    "chain_sum",
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    200,
    "Sums and differences of two digits, by reasoning-gym.",
    8,
    0.3,
    "The curriculum reaches the target after a sixth fewer episodes, and ends where the others end. Its "
    "mean is that of the tasks that it plays: of 192 groups it leaves out 28.",
)
COUNT_BITS = experiment(
    "count_bits",
    {"min_n": 1, "max_n": 127},
    150,
    "How many bits of a number below 128 are 1, by reasoning-gym.",
    4,
    0.4,
    "The curriculum reaches the target after a third fewer episodes, and ends where the others end. Its "
    "mean is that of the tasks that it plays: of 192 groups it leaves out 23.",
)
