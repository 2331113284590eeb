"""`weir env demo`: a tiny model learns a task of reasoning-gym on the demo's services, and is judged before
and after.

questions of the library ──▶ warm start (cached) ──▶ stack up ──▶ eval ──▶ run ──▶ eval ──▶ stack down

The rows of the warm start:

clean.jsonl   first phase: right answers
probe.jsonl   one right answer for each question; the first phase ends when the model knows 95 % of them
habit.jsonl   second phase: mostly wrong answers, so that there is something to improve
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from environments.settings import RunSettings
from environments.start_run import RunPlace, source_of
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from weir.demo.lesson import Lesson, Say, place_in, teach
from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.demo.student import WARM_START, TrainingRow, write_rows, write_student
from weir.stack.settings import StackSettings
from weir.stack.stack_state import refuse_in_use

HABIT_WRONG = 0.75
"""The share of wrong answers in habit.jsonl. After them, the model mostly answers wrongly."""
ROWS = 4096
GATE = {"gate": 0.95, "max_steps": 1500}


class Question(NamedTuple):
    text: str
    answer: str


def write_question_plan(directory: Path, questions: Sequence[Question]) -> None:
    """Write config, tokenizer, rows and hyperparameters for `python -m trainer_service.warm_start`.

    A wrong answer is the right one of another question, so it has the right form.
    """
    write_student(directory, [f"{each.text} {each.answer}" for each in questions])
    renderer = ChatRenderer(directory)
    right = [_row(renderer, each.text, each.answer) for each in questions]
    random = Random(0)
    wrong = [_wrong(renderer, questions, random) for _ in range(round(ROWS * HABIT_WRONG))]
    write_rows(directory / "habit.jsonl", [*random.choices(right, k=ROWS - len(wrong)), *wrong])
    for name in ("clean", "probe"):
        write_rows(directory / f"{name}.jsonl", right)
    (directory / "plan.json").write_text(json.dumps(WARM_START | GATE, indent=2), encoding="utf-8")


def _wrong(renderer: ChatRenderer, questions: Sequence[Question], random: Random) -> TrainingRow:
    asked, other = random.choice(questions), random.choice(questions)
    return _row(renderer, asked.text, other.answer)


def _row(renderer: ChatRenderer, question: str, answer: str) -> TrainingRow:
    prompt = renderer.render([{"role": "user", "content": question}], None)
    said = TokenIds(renderer.tokenizer.encode(f"{answer}<|im_end|>"))
    return [*prompt, *said], [0] * len(prompt) + [1] * len(said)


ENVIRONMENT = "reasoning_gym:chain_sum"
OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
QUESTIONS = 1024
"""Enough tasks to see nearly every sum of two digits."""
TARGET = 0.85
JUDGED = 0.5
MOST_S = 300.0


def run(settings: StackSettings, seed: int, say: Say) -> bool:
    """Run the demo. Returns whether the evaluations show that the model has learned."""
    refuse_in_use(settings.run_dir)
    training = RunSettings(
        environment=ENVIRONMENT,
        options=OPTIONS,
        seed=seed,
        sampling={"max_tokens": 8},
        until_reward=TARGET,
        time_limit_s=MOST_S,
    )
    questions = asyncio.run(_questions(training, place_in(settings)))
    model, _ = model_for(
        settings.models_dir, seed, say, "chain-sum", lambda plan: write_question_plan(plan, questions)
    )
    lesson = Lesson(training, services_of_demo(seed), judged_on=256, learned_from=JUDGED)
    return teach(settings, model, lesson, say)


async def _questions(given: RunSettings, place: RunPlace) -> list[Question]:
    """Questions of the library, each once, with the answers that it gives."""
    async with source_of(given, place) as source:
        tasks = await source.tasks(given.seed, 0, QUESTIONS)
    return sorted({Question(str(task.data["question"]), str(task.data["answer"])) for task in tasks})
