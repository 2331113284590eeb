"""The KL penalty: estimators of the divergence from policy to reference, token by token, and their gradients.

All arguments and results are [T], in nats; d = lp_new - lp_ref (Schulman, "Approximating KL Divergence",
2020).

Names in backticks with a dot, such as `kl.k1`, are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainer_service.algorithms.setting_choices import Above0, AtLeast0, Frozen
from trainer_service.algorithms.tokens import Tokens, bounded, ratio

LOW_VAR_BOUND = 10.0
LARGEST_ERROR = 0.2
"""The relative error of a KL that the controller of its coefficient sees at most."""


def k1(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """d; its gradient is 1 for every policy (`kl.k1`)."""
    return lp_new_T - lp_ref_T


def absolute(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """|d| (`kl.abs`)."""
    return (lp_new_T - lp_ref_T).abs()


def k2(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """d² / 2, with gradient d (`kl.k2`)."""
    return (lp_new_T - lp_ref_T) ** 2 / 2


def k3(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """exp(-d) - 1 + d, with gradient 1 - exp(-d); d is clipped to ± 20 nats, with gradient 0 outside
    (`kl.k3`)."""
    difference_T = bounded(lp_new_T - lp_ref_T)
    return (-difference_T).exp() - 1 + difference_T


def low_var(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """k3 clipped at 10 nats, with gradient 0 above: what verl and SkyRL call k3 (`kl.low_var_kl`)."""
    return k3(lp_new_T, lp_ref_T).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)


def k3_plus(lp_new_T: Tensor, lp_ref_T: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (verl's `k3+`; `kl.k3_plus`)."""
    square_T = k2(lp_new_T, lp_ref_T)
    return square_T - square_T.detach() + k3(lp_new_T, lp_ref_T).detach()


def unbiased(lp_new_T: Tensor, lp_ref_T: Tensor, lp_old_T: Tensor) -> Tensor:
    """r · k3. The ratio r of new to old probability has a gradient as well (DeepSeek-V3.2, arXiv:2512.02556;
    `kl.unbiased_is_k3`)."""
    return ratio(lp_new_T, lp_old_T) * k3(lp_new_T, lp_ref_T)


KLS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": lambda new, ref, _: k1(new, ref),
    "abs": lambda new, ref, _: absolute(new, ref),
    "k2": lambda new, ref, _: k2(new, ref),
    "k3": lambda new, ref, _: k3(new, ref),
    "low_var": lambda new, ref, _: low_var(new, ref),
    "k3_plus": lambda new, ref, _: k3_plus(new, ref),
    "unbiased": unbiased,
}
"""Each function takes lp_new_T, lp_ref_T and lp_old_T."""


class Kl(Frozen):
    """The KL penalty towards the reference policy."""

    estimator: Literal["k1", "abs", "k2", "k3", "low_var", "k3_plus", "unbiased"] = "k3"
    coefficient: AtLeast0 = 0.0
    target: Above0 | None = None
    """If set, `coefficient` is only the first one. After each step it rises if the KL, in nats per token, was
    above the target, and falls if it was below."""
    reference_every_steps: int | None = Field(None, ge=1)
    """After every so many steps, the reference becomes the policy of now. None: it stays the base model."""
    horizon: Above0 = 10_000.0
    """For `target`: in so many rollouts, the coefficient changes by the relative error, at most 20 %."""

    @model_validator(mode="after")
    def _pulls(self) -> "Kl":
        if self.target is not None and not self.coefficient:
            raise ValueError("kl: target multiplies the coefficient, so the first one must be above 0")
        if self.coefficient and self.estimator == "k1":
            raise ValueError(
                "kl: the gradient of k1 is 1 for every policy, so as a loss it does not pull to the reference"
            )
        return self

    def of(self, tokens: Tokens) -> Tensor:
        """[T] in nats; 0 without a coefficient."""
        if not self.coefficient:
            return torch.zeros_like(tokens.lp_prox_T)
        return KLS[self.estimator](tokens.lp_new_T, tokens.reference(), tokens.lp_prox_T)


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, horizon: float, rollouts: int
) -> float:
    """The coefficient after a step of so many rollouts, in which the KL was `measured`: coefficient · (1 +
    clip(measured / target - 1, ± 0.2) · rollouts / horizon), the proportional controller of Ziegler et al.
    2019 (arXiv:1909.08593, section 2.2), as in TRL and verl. A step of more rollouts than `horizon` counts as
    `horizon`, so that the coefficient stays above 0."""
    error = max(-LARGEST_ERROR, min(LARGEST_ERROR, measured / target - 1))
    return coefficient * (1 + error * min(1.0, rollouts / horizon))
