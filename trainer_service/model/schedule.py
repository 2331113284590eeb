"""Computes the learning rate of each step of a run, as a factor of the full rate.

step ─▶ warm-up: 0 … 1 ─▶ constant, linear or cosine: 1 … min_lr_ratio, at total_steps ─▶ factor of `lr`
"""

import math
from collections.abc import Callable
from functools import partial

from trainer_service.model.settings import OptimizerSettings


def schedule_of(settings: OptimizerSettings) -> Callable[[int], float]:
    """The factor of `lr` for a step, as a function of the number of steps before it."""
    if settings.total_steps is None:
        return partial(warmed_up, warmup_steps=settings.warmup_steps)
    shape = {"linear": linear, "cosine": cosine}[settings.schedule]
    span = settings.total_steps - settings.warmup_steps

    def factor(step: int) -> float:
        progress = min(1.0, max(0.0, (step + 1 - settings.warmup_steps) / span))
        return warmed_up(step, settings.warmup_steps) * floored(shape(progress), settings.min_lr_ratio)

    return factor


def warmed_up(step: int, warmup_steps: int) -> float:
    """A linear increase to 1, reached by the last step of the warm-up."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


def linear(progress: float) -> float:
    """Falls linearly from 1 at progress 0 to 0 at progress 1."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, SGDR, 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def floored(value: float, ratio: float) -> float:
    """Maps [0, 1] linearly to [ratio, 1]."""
    return ratio + (1.0 - ratio) * value
