"""A lesson: a model is judged, trained on an environment, and judged again on other tasks.

stack up ──▶ eval ──▶ run ──▶ eval ──▶ stack down
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.session_client import SessionClient
from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run
from rollout_queue import clock
from weir.stack.run_keys import with_keys
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.stack_state import refuse_in_use

EVAL_SEED = 1_000
"""The tasks of the evaluations are not those of the training."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Lesson:
    """What is taught, how, and when it is learned."""

    run: RunSettings
    """Of the training. The evaluations sample the same way."""
    services: Mapping[str, Mapping[str, Any]]
    """Settings of the services; those that the user gave win over them."""
    judged_on: int
    """Tasks of each evaluation."""
    learned_from: float
    """At least this is the reward in the evaluation after the training."""
    questions: Sequence[list[Any]] = ()
    """Messages that the model answers before and after, sampled as in the training. The last one is shown."""


@dataclass(frozen=True)
class LessonOutcome:
    """The summaries of the three runs, and the answers to the lesson's questions."""

    before: dict[str, Any]
    training: dict[str, Any]
    after: dict[str, Any]
    answers: tuple[Sequence[str], Sequence[str]]
    seconds: float

    def learned(self, at_least: float) -> bool:
        """Whether the intervals of the evaluations do not touch, and the last reward is high enough."""
        before, after = self.before["reward"], self.after["reward"]
        return bool(after["low"] > before["high"] and after["mean"] >= at_least)


def teach(settings: StackSettings, model: Path, lesson: Lesson, say: Say) -> bool:
    """Give the lesson to the model, on a stack of its own. Returns whether the evaluations show that it has
    learned."""
    refuse_in_use(settings.run_dir)
    settings = with_keys(settings)
    services = merged(lesson.services, settings.services)
    for left in ("redis", "policies", "weights", "checkpoints", "tensorboard", "before", "train", "after"):
        shutil.rmtree(settings.run_dir / left, ignore_errors=True)
    with Stack(settings.model_copy(update={"model_path": model, "services": services})) as stack:
        stack.wait_ready(on_wait=say)
        outcome = asyncio.run(_played(settings, lesson, say))
    for line in told(lesson, outcome):
        say(line)
    return outcome.learned(lesson.learned_from)


async def _played(settings: StackSettings, lesson: Lesson, say: Say) -> LessonOutcome:
    training, began = lesson.run, clock.monotonic()
    judging = training.model_copy(
        update={
            "mode": "eval",
            "tasks": lesson.judged_on,
            "group_size": 1,
            "seed": EVAL_SEED + training.seed,
            "until_reward": None,
            "time_limit_s": None,
        }
    )

    async def played(name: str, what: RunSettings) -> dict[str, Any]:
        say(f"{name}:")
        return await play_run(what, place_in(settings, name), say)

    first = await _answers(settings, lesson, "before")
    before = await played("before", judging)
    trained = await played("train", training)
    after = await played("after", judging)
    last = await _answers(settings, lesson, "after")
    return LessonOutcome(before, trained, after, (first, last), clock.monotonic() - began)


def place_in(settings: StackSettings, name: str = "") -> RunPlace:
    """Where a run of this stack happens."""
    url = f"http://127.0.0.1:{settings.gateway_port}"
    return RunPlace(settings.run_dir / name, url, settings.client_keys[0] if settings.client_keys else None)


async def _answers(settings: StackSettings, lesson: Lesson, when: str) -> list[str]:
    """What the model says, in a session for each question that is not trained."""
    place, answers = place_in(settings), []
    async with SessionClient(place.gateway_url, place.client_key) as gateway:
        for number, question in enumerate(lesson.questions):
            session = await gateway.open_session(f"{when}-{number}", {"train": False})
            reply = await gateway.model_client(session).chat.completions.create(
                model="policy",
                messages=question,
                seed=number,
                extra_body=lesson.run.sampling,
            )
            answers.append(reply.choices[0].message.content or "")
            await gateway.finish(session["session_id"], "completed", None, None)
    return answers


def told(lesson: Lesson, outcome: LessonOutcome) -> list[str]:
    """The outcome in lines for a terminal."""
    trained = outcome.training
    lines = []
    for question, first, last in zip(lesson.questions, *outcome.answers, strict=True):
        lines += [
            "",
            "asked:  " + question[-1]["content"],
            f"before: {_on_one_line(first)}",
            f"after:  {_on_one_line(last)}",
        ]
    change = f"{trained['reward_start']:.2f} → {trained['reward_end']:.2f}"
    took = f"{outcome.seconds / 60:.1f} minutes"
    lines += ["", f"training: reward {change} in {trained['episodes']} episodes; all of it took {took}"]
    for name, judged in (("before", outcome.before), ("after", outcome.after)):
        reward = judged["reward"]
        interval = f"{reward['mean']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}]"
        lines.append(f"{name}: {interval} on {len(judged['tasks'])} other tasks")
    return lines


def _on_one_line(text: str) -> str:
    return " ".join(text.split())
