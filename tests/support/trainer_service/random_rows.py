"""Random rows, and a policy that learns from them without a stream, a gateway or a trainer loop."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.rows.rows import Row, TopTokens
from trainer_service.settings import TrainerSettings
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.step.step_parts import StepRequest

VOCABULARY = 64
POISON = 1e-42
"""A positive temperature that is so small that every logit divided by it is infinite."""


def random_rows(seed: int, count: int, temperature: float = 1.0) -> list[Row]:
    """Rows of unequal lengths, so that ranks get unequal shares."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(draw.integers(6, 40))
        mask = np.array([0, 0, *[1] * (length - 2)])
        made.append(
            Row(
                session_id=f"s{index}",
                turn_ids=(f"t{index}",),
                advantage=float(draw.normal()),
                ids_L=draw.integers(2, VOCABULARY, length),
                mask_L=mask,
                logprobs_L=np.where(mask == 1, -4.0, 0.0).astype(np.float32),
                versions_L=np.where(mask == 1, 0, -1),
                temperatures_L=np.full(length, temperature, np.float32),
                turns_L=np.where(mask == 1, 0, -1),
                rewards_L=np.zeros(length, np.float32),
            )
        )
    return made


def with_experts(rows: list[Row]) -> list[Row]:
    """The rows with two random experts for each token in each of two layers."""
    draw = np.random.default_rng(5)

    def drawn(length: int) -> Any:
        each = [
            draw.permuted(np.tile(np.arange(4, dtype=np.int16), (length, 1)), axis=1)[:, :2] for _ in "12"
        ]
        return np.concatenate(each, axis=1)

    return [replace(row, experts_LW=drawn(len(row))) for row in rows]


def in_groups(seed: int, sizes: list[int], temperature: float = 1.0) -> list[Row]:
    """Rows of groups of these sizes."""
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    rows = random_rows(seed, len(groups), temperature)
    return [replace(row, group_id=group_id) for row, group_id in zip(rows, groups, strict=True)]


def taught(seed: int, count: int, top_k: int) -> list[Row]:
    """The rows with so many tokens of a teacher at each trained place."""
    draw = np.random.default_rng([seed, 9])

    def top(tokens: int) -> TopTokens:
        ids = draw.permuted(np.tile(np.arange(VOCABULARY, dtype=np.int32), (tokens, 1)), axis=1)[:, :top_k]
        return TopTokens(
            ids, np.log(draw.dirichlet(np.ones(top_k + 1), tokens)[:, :top_k]).astype(np.float32)
        )

    return [
        replace(row, lp_teacher_L=row.logprobs_L, teacher_top=top(row.trained_tokens))
        for row in random_rows(seed, count)
    ]


def row_of(length: int, seed: int = 0) -> Row:
    """One row with a random mask."""
    draw = np.random.default_rng([seed, length])
    mask = draw.integers(0, 2, length)
    mask[0], mask[-1] = 0, 1
    return Row(
        session_id=f"s{seed}",
        turn_ids=("t",),
        advantage=float(draw.normal()),
        ids_L=draw.integers(2, VOCABULARY, length),
        mask_L=mask,
        logprobs_L=np.where(mask == 1, -4.0, 0.0).astype(np.float32),
        versions_L=np.where(mask == 1, 0, -1),
        temperatures_L=np.full(length, 0.8, np.float32),
        turns_L=np.where(mask == 1, 0, -1),
        rewards_L=np.zeros(length, np.float32),
    )


class OneRankLearner:
    """A policy on one rank that learns from random rows and exports its weights."""

    def __init__(self, root: Path, settings: TrainerSettings) -> None:
        self.root, self.settings = root, settings
        self.policy = DeepSpeedPolicy(settings)
        self.leader = DistributedPolicy(self.policy)

    def learn(self, seed: int, count: int = 6, **fields: Any) -> dict[str, float]:
        return self.leader.optimise(
            StepRequest(random_rows(seed, count, **fields), 0, self.settings.algorithm)
        )

    def exported(self) -> dict[str, torch.Tensor]:
        return {tensor.name: tensor.value.clone() for tensor in self.leader.snapshot().tensors}


MakeLearner = Callable[..., OneRankLearner]
