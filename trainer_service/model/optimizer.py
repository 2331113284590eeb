"""AdamW, as each stage of ZeRO needs it."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from trainer_service.settings import OptimizerSettings, TrainerSettings


def make_optimizer(parameters: Iterable[Tensor], settings: TrainerSettings) -> torch.optim.AdamW:
    """Fused AdamW: as quick as DeepSpeed's own, and nothing to compile at start."""
    given: dict[str, Any] = {
        "lr": settings.optimizer.lr,
        "betas": (settings.optimizer.beta1, settings.optimizer.beta2),
        "weight_decay": settings.optimizer.weight_decay,
        "fused": True,
    }
    if settings.zero_stage == 0:
        return ClippingAdamW(parameters, settings.optimizer.max_grad_norm, given)
    return torch.optim.AdamW(parameters, **given)


class ClippingAdamW(torch.optim.AdamW):
    """What ZeRO's optimizers do around the one that they wrap: at stage 0 DeepSpeed calls AdamW bare, clips
    without a look at the norm, and would write a gradient that is not finite into the weights.

    DeepSpeed reads the two attributes after each step, as it does with its own optimizers.
    """

    def __init__(self, parameters: Iterable[Tensor], max_norm: float, given: dict[str, Any]) -> None:
        super().__init__(parameters, **given)
        self._max_norm = max_norm
        self._global_grad_norm = 0.0
        """Before it was clipped."""
        self.overflow = False
        """Whether the last step was left out; the schedule then stays where it is."""
        self._loss_scale = 1.0

    def override_loss_scale(self, loss_scale: float) -> None:
        """What the gradient is divided by before anything else."""
        self._loss_scale = loss_scale

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        trained = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if self._loss_scale != 1:
            for each in trained:
                each.grad.div_(self._loss_scale)
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self._max_norm))
        self._global_grad_norm, self.overflow = norm, not math.isfinite(norm)
        if not self.overflow:
            super().step(closure)


def as_configured(engine: Any, settings: OptimizerSettings) -> None:
    """A restored optimizer goes at today's rate: a checkpoint brings back that of the run that wrote it, and
    an operator may have lowered it since. Where nothing has changed, nothing changes."""
    schedule = engine.lr_scheduler
    schedule.base_lrs = [settings.lr for _ in schedule.base_lrs]
    rates = [settings.lr * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
    schedule._last_lr = rates
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["initial_lr"], group["lr"] = settings.lr, rate
        group["betas"], group["weight_decay"] = (settings.beta1, settings.beta2), settings.weight_decay
