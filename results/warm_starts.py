"""Warm starts of the experiments: right conversations until the model knows the task, then mostly wrong ones.

A model that has only seen right answers is sure of what it says, and what it is wrong about it never tries
otherwise. After the wrong ones it tries many things, and has something to learn.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from gateway.language.render import ChatRenderer
from results.experiment import Say
from rollout_queue.contract.packed_tokens import TokenIds
from weir.demo.make_model import model_for
from weir.demo.student import WARM_START, TrainingRow, write_rows, write_student

Message = dict[str, Any]
SEED = 0
ROWS = 4096
"""Of the second phase."""


@dataclass(frozen=True)
class Conversation:
    """What a model hears, and what it says: messages, and texts between them."""

    heard: Sequence[Sequence[Message]]
    said: Sequence[str]
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class WarmStart:
    """Conversations, and how long each phase is. `texts` are what the tokenizer learns its words from."""

    texts: Sequence[str]
    right: Sequence[Conversation]
    wrong: Sequence[Conversation]
    steps: int
    """Of the first phase."""
    batch: int = 64
    """Conversations of a step."""
    wrong_share: float = 0.7
    """The share of wrong conversations in the second phase."""
    wrong_steps: int = 40

    def write(self, directory: Path) -> None:
        """Write config, tokenizer, rows and hyperparameters for `python -m trainer_service.warm_start`."""
        write_student(directory, self.texts)
        rows = partial(row_of, ChatRenderer(directory))
        right, wrong = [*map(rows, self.right)], [*map(rows, self.wrong)]
        draw = Random(0)
        count = round(ROWS * self.wrong_share)
        write_rows(directory / "clean.jsonl", right)
        write_rows(directory / "probe.jsonl", right[:256])
        write_rows(
            directory / "habit.jsonl", [*draw.choices(wrong, k=count), *draw.choices(right, k=ROWS - count)]
        )
        plan = {"gate": 0.0, "min_steps": self.steps, "max_steps": self.steps + 1, "lr": 2e-3}
        plan |= {"habit_steps": self.wrong_steps, "check_every": 50, "threads": 1}
        (directory / "plan.json").write_text(json.dumps(WARM_START | plan, indent=2), encoding="utf-8")


def made_by(name: str, warm_start: Callable[[], WarmStart]) -> Callable[[Path, Say], Path]:
    """`Experiment.model` for a warm start."""

    def model(models: Path, say: Say) -> Path:
        return model_for(models, SEED, say, name, warm_start().write)[0]

    return model


def row_of(renderer: ChatRenderer, conversation: Conversation) -> TrainingRow:
    """The ids of a conversation as the gateway records them, and a mask that is 1 for what the model says."""
    tools = list(conversation.tools) or None
    messages = list(conversation.heard[0])
    ids = list(renderer.render(messages, tools))
    mask = [0] * len(ids)
    for text, following in zip_longest(conversation.said, conversation.heard[1:], fillvalue=()):
        said = renderer.tokenizer.encode(f"{text}<|im_end|>")
        added: list[int] = []
        if following:
            messages += [{"role": "assistant", "content": text}, *following]
            added = _following(renderer, ids, said, following, messages, tools)
        ids += [*said, *added]
        mask += [1] * len(said) + [0] * len(added)
    return ids, mask


def _following(
    renderer: ChatRenderer, ids: list[int], said: list[int], heard: Any, messages: list[Message], tools: Any
) -> list[int]:
    """What the messages that were heard add, or what the whole conversation has after what was said."""
    added = renderer.bridge(TokenIds(ids), TokenIds(said), list(heard), tools)
    if added is not None:
        return list(added)
    whole, known = list(renderer.render(messages, tools)), [*ids, *said]
    if whole[: len(known)] != known:
        raise RuntimeError("the chat template renders the earlier conversation differently")
    return whole[len(known) :]


def one_answer(question: str, answer: str) -> Conversation:
    return Conversation([[{"role": "user", "content": question}]], [answer])
