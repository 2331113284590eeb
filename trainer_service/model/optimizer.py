"""Makes the AdamW optimizer for each stage of ZeRO, and its learning rate of each step.

step ─▶ warm-up: 0 … 1 ─▶ constant, linear or cosine: 1 … min_lr_ratio, at total_steps ─▶ factor of `lr`
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from rollout_queue.trainer_commands import OptimStep
from trainer_service.model.settings import ModelSettings, OptimizerSettings


class AdamWArguments(TypedDict):
    """The keyword arguments of torch's AdamW that come from the settings."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    fused: bool


def make_optimizer(parameters: Iterable[Tensor], settings: ModelSettings) -> torch.optim.AdamW:
    """Torch's fused AdamW, which is as fast as DeepSpeed's own and needs no compilation."""
    arguments = AdamWArguments(
        lr=settings.optimizer.lr,
        betas=(settings.optimizer.beta1, settings.optimizer.beta2),
        weight_decay=settings.optimizer.weight_decay,
        fused=True,
    )
    if settings.zero_stage == 0:
        return ClippingAdamW(parameters, settings.optimizer.max_grad_norm, arguments)
    return torch.optim.AdamW(parameters, **arguments)


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that clips the gradient, and skips the step if the gradient's norm is not finite.

    From stage 1 on, ZeRO's optimizers do both. At stage 0, DeepSpeed calls AdamW directly and does not check
    the norm, so a gradient that is not finite would make the weights not finite. DeepSpeed reads
    `_global_grad_norm` and `overflow` after each step, as it does with its own optimizers."""

    def __init__(self, parameters: Iterable[Tensor], max_norm: float, arguments: AdamWArguments) -> None:
        super().__init__(parameters, **arguments)
        self.max_norm = max_norm
        """The largest norm of the gradient."""
        self._global_grad_norm = 0.0
        """The norm of the last gradient before it was clipped."""
        self.overflow = False
        """Whether the last step was skipped; the schedule then does not advance."""
        self._loss_scale = 1.0

    def override_loss_scale(self, loss_scale: float) -> None:
        """Set the number that the gradient is divided by before it is clipped."""
        self._loss_scale = loss_scale

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if self._loss_scale != 1:
            for each in trained:
                each.grad.div_(self._loss_scale)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self.max_norm))
        self._global_grad_norm, self.overflow = norm, not math.isfinite(norm)
        if not self.overflow:
            super().step(closure)


def set_rates(optimizer: Any, rates: OptimStep) -> None:
    """Let the next step of a DeepSpeed engine's optimizer use these settings."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = rates.learning_rate, (rates.beta1, rates.beta2)
        group["eps"], group["weight_decay"] = rates.eps, rates.weight_decay
    if isinstance(optimizer, ClippingAdamW):
        optimizer.max_norm = rates.grad_clip_norm or math.inf
    else:
        optimizer.clip_grad = rates.grad_clip_norm


def apply_configured_rates(engine: Any, settings: OptimizerSettings, scale: float) -> None:
    """Give a restored optimizer `scale` times the learning rate of the settings, and their betas and weight
    decay. The checkpoint restored the values of the run that wrote it."""
    schedule = engine.lr_scheduler
    lr = settings.lr * scale
    schedule.base_lrs = [lr for _ in schedule.base_lrs]
    rates = [lr * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    schedule._last_lr = rates
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = lr, rate
        group["betas"], group["weight_decay"] = (settings.beta1, settings.beta2), settings.weight_decay


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
