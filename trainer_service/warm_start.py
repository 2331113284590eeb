"""Trains a first policy by supervised learning: on clean examples until it masters them, then on examples of
a bad habit, so that reinforcement learning has something to improve.

    PLAN_DIR/{config.json, tokenizer …, clean.jsonl, habit.jsonl, probe.jsonl, plan.json} ─▶ MODEL_DIR

python -m trainer_service.warm_start --plan PLAN_DIR --out MODEL_DIR --seed N
"""

import argparse
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from trainer_service.storage.durable_files import sync_tree

NOT_COPIED = ("plan.json", "config.json", "generation_config.json")


class Plan(BaseModel):
    """The fields of plan.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(3e-3, gt=0)
    batch: int = Field(32, ge=1)
    warmup_steps: int = Field(30, ge=0)
    gate: float = Field(0.98, ge=0, le=1)
    """The share of probe examples that must be exact before the habit is trained
    (`SupervisedTraining.exact`)."""
    check_every: int = Field(20, ge=1)
    min_steps: int = Field(60, ge=0)
    max_steps: int = Field(800, ge=1)
    habit_steps: int = Field(60, ge=0)
    habit_lr_scale: float = Field(0.3, gt=0)
    threads: int | None = Field(None, ge=1)


class Example(NamedTuple):
    """A token sequence, and a mask of the same length: 1 for tokens to learn, 0 for the others."""

    ids: list[int]
    mask: list[int]


class SupervisedTraining:
    """A model in training: its optimizer steps, and its score on examples."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.steps = 0

    def learn(self, examples: Sequence[Example], lr_scale: float = 1.0) -> float:
        """Make one step on the mean cross entropy of the tokens to learn. Returns that mean, in nats."""
        self.steps += 1
        warmup = min(1.0, self.steps / max(1, self._plan.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.lr * warmup * lr_scale
        tokens = sum(sum(example.mask) for example in examples)
        total = 0.0
        for part in by_length(examples):
            logits_TV, targets_T, _ = self._masked(part)
            loss = torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="sum") / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    @torch.no_grad()
    def exact(self, examples: Sequence[Example]) -> float:
        """The share of examples that are exact: every token to learn is the most likely one after the tokens
        before it."""
        exact = 0
        for part in by_length(examples):
            logits_TV, targets_T, rows_T = self._masked(part)
            wrong_T = logits_TV.argmax(-1) != targets_T
            exact += len(part) - len(set(rows_T[wrong_T].tolist()))
        return exact / len(examples)

    def _masked(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """The logits [T, V] that predict the T tokens to learn, these tokens [T], and the index [T] of each
        token's example.

        Rows are padded on the right: in a causal model, padding does not change the tokens before it."""
        width = max(len(example.ids) for example in examples)
        ids_BL = torch.zeros((len(examples), width), dtype=torch.long)
        mask_BL = torch.zeros((len(examples), width), dtype=torch.bool)
        for row, example in enumerate(examples):
            ids_BL[row, : len(example.ids)] = torch.tensor(example.ids)
            mask_BL[row, : len(example.mask)] = torch.tensor(example.mask, dtype=torch.bool)
        mask_BL[:, 0] = False
        hidden_BLH = self._model.model(input_ids=ids_BL, use_cache=False).last_hidden_state
        rows_T, columns_T = mask_BL.nonzero(as_tuple=True)
        logits_TV: Tensor = self._model.lm_head(hidden_BLH[rows_T, columns_T - 1])
        return logits_TV.float(), ids_BL[rows_T, columns_T], rows_T


def warm_start(plan_dir: Path, out: Path, seed: int) -> dict[str, float]:
    """Train a model, and write it to `out`. Returns the number of steps, the score on the probe, and the
    seconds. Raises SystemExit if the score stays below the gate, an example is invalid, or `out` exists."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    started = clock.monotonic()
    plan = Plan.model_validate_json((plan_dir / "plan.json").read_text(encoding="utf-8"))
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    clean, habit, probe = (_examples(plan_dir / f"{name}.jsonl") for name in ("clean", "habit", "probe"))
    config = AutoConfig.from_pretrained(plan_dir)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    training = SupervisedTraining(model, plan)
    score = 0.0
    while score < plan.gate or training.steps < plan.min_steps:
        if training.steps >= plan.max_steps:
            raise SystemExit(
                f"warm start: {score:.1%} of the probe is exact after {training.steps} steps; the gate is "
                f"{plan.gate:.1%}"
            )
        loss = training.learn(draw.choices(clean, k=plan.batch))
        if training.steps >= plan.min_steps and training.steps % plan.check_every == 0:
            score = training.exact(probe)
        if training.steps % plan.check_every == 0:
            _progress("clean", training.steps, loss, score, started)
    for _ in range(plan.habit_steps):
        loss = training.learn(draw.choices(habit, k=plan.batch), plan.habit_lr_scale)
        if training.steps % plan.check_every == 0:
            _progress("habit", training.steps, loss, score, started)
    _save(model, plan_dir, out)
    return {"steps": training.steps, "probe": score, "seconds": round(clock.monotonic() - started, 2)}


def _save(model: Any, plan_dir: Path, out: Path) -> None:
    """Write the model to a directory beside `out`, and rename that: `out` is always a complete model."""
    if out.exists():
        raise SystemExit(f"warm start: {out} exists already")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    model.save_pretrained(draft)
    for source in sorted(plan_dir.iterdir()):
        if source.is_file() and source.suffix != ".jsonl" and source.name not in NOT_COPIED:
            shutil.copyfile(source, draft / source.name)
    sync_tree(draft)
    draft.rename(out)


def _examples(path: Path) -> list[Example]:
    examples = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = read_json(line)
                example = Example(row["ids"], row["mask"])
            except (ValueError, LookupError, TypeError) as error:
                raise SystemExit(f"warm start: {path.name} line {number} is no example: {error}") from error
            if len(example.ids) != len(example.mask) or not any(example.mask[1:]):
                raise SystemExit(f"warm start: {path.name} line {number} has no valid mask")
            examples.append(example)
    if not examples:
        raise SystemExit(f"warm start: {path.name} is empty")
    return examples


def by_length(examples: Sequence[Example], parts: int = 4) -> list[Sequence[Example]]:
    """The examples, sorted by length and cut into at most `parts` batches: so they need little padding."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    size = max(8, -(-len(ordered) // parts))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _progress(phase: str, step: int, loss: float, score: float, started: float) -> None:
    seconds = clock.monotonic() - started
    print(f"{phase} step {step}: loss {loss:.4f}, probe {score:.1%}, {seconds:.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="trainer_service.warm_start", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(json.dumps(warm_start(given.plan, given.out, given.seed)), flush=True)


if __name__ == "__main__":
    main()
