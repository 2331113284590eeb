"""Writes the training rows of a warm start on questions with one answer each, such as those of reasoning-gym.

clean.jsonl   first phase: right answers
probe.jsonl   one right answer for each question; the first phase ends when the model knows 95 % of them
habit.jsonl   second phase: mostly wrong answers, so that there is something to improve
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from gateway.language.render import ChatRenderer
from rollout_queue.contract.tokens import TokenIds
from weir.demo.plan import WARM_START, TrainingRow, write_rows, write_student

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
