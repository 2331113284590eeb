"""`weir env demo`: a tiny model learns a task of reasoning-gym on the demo's services, and is judged before
and after.

questions of the library ──▶ warm start (cached) ──▶ stack up ──▶ eval ──▶ run ──▶ eval ──▶ stack down
"""

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

from environments.settings import RunSettings
from environments.start import RunPlace, play_run, source_of
from weir.demo.make_model import model_for
from weir.demo.settings import services_of_demo
from weir.env.question_plan import Question, write_question_plan
from weir.stack.keys import with_keys
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.state import refuse_in_use

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
