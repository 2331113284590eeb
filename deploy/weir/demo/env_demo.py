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
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run, source_of
from gateway.language.render import ChatRenderer
from rollout_queue.contract.packed_tokens import TokenIds
from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.demo.student import WARM_START, TrainingRow, write_rows, write_student
from weir.stack.run_keys import with_keys
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
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
"""At least this is the reward in the evaluation after the training."""
MOST_S = 300.0
EVAL_SEED = 1_000
"""The tasks of the evaluations are not those of the training."""
Say = Callable[[str], None]


def run(settings: StackSettings, seed: int, say: Say) -> bool:
    """Run the demo. Returns whether the evaluations show that the model has learned."""
    refuse_in_use(settings.run_dir)
    settings = with_keys(settings)
    gateway_url = f"http://127.0.0.1:{settings.gateway_port}"
    place = RunPlace(settings.run_dir, gateway_url, settings.client_keys[0])
    given = RunSettings(environment=ENVIRONMENT, options=OPTIONS, seed=seed, sampling={"max_tokens": 8})
    questions = asyncio.run(_questions(given, place))
    model, _ = model_for(
        settings.models_dir, seed, say, "chain-sum", lambda plan: write_question_plan(plan, questions)
    )
    services = merged(services_of_demo(seed), settings.services)
    for left in ("redis", "policies", "weights", "checkpoints", "tensorboard", "before", "train", "after"):
        shutil.rmtree(settings.run_dir / left, ignore_errors=True)
    with Stack(settings.model_copy(update={"model_path": model, "services": services})) as stack:
        stack.wait_ready(on_wait=say)
        before, trained, after = asyncio.run(_play(given, place, say))
    _tell(before, trained, after, say)
    risen = after["reward"]["low"] > before["reward"]["high"]
    return bool(risen and after["reward"]["mean"] >= JUDGED)


async def _questions(given: RunSettings, place: RunPlace) -> list[Question]:
    """Questions of the library, each once, with the answers that it gives."""
    async with source_of(given, place) as source:
        tasks = await source.tasks(given.seed, 0, QUESTIONS)
    return sorted({Question(str(task.data["question"]), str(task.data["answer"])) for task in tasks})


async def _play(given: RunSettings, place: RunPlace, say: Say) -> tuple[dict[str, Any], ...]:
    judging = given.model_copy(
        update={"mode": "eval", "tasks": 256, "group_size": 1, "seed": EVAL_SEED + given.seed}
    )
    training = given.model_copy(update={"until_reward": TARGET, "time_limit_s": MOST_S})

    async def played(name: str, what: RunSettings) -> dict[str, Any]:
        say(f"{name}:")
        here = RunPlace(place.run_dir / name, place.gateway_url, place.client_key)
        return await play_run(what, here, say)

    return await played("before", judging), await played("train", training), await played("after", judging)


def _tell(before: dict[str, Any], trained: dict[str, Any], after: dict[str, Any], say: Say) -> None:
    change = f"{trained['reward_start']:.2f} → {trained['reward_end']:.2f}"
    say(f"training: reward {change} in {trained['episodes']} episodes")
    for name, judged in (("before", before), ("after", after)):
        reward = judged["reward"]
        interval = f"{reward['mean']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}]"
        say(f"{name}: {interval} on {len(judged['tasks'])} other tasks")
