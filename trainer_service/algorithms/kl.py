"""Estimators of the KL divergence from policy to reference, token by token, and their gradients.

All arguments and results are [T], in nats; d = lp_new - lp_ref (Schulman, "Approximating KL Divergence",
2020).

Names in backticks with a dot, such as `kl.k1`, are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer_service.algorithms.tokens import bounded, ratio

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


def adapted_coefficient(
    coefficient: float, measured: float, *, target: float, horizon: float, rollouts: int
) -> float:
    """The coefficient after a step of so many rollouts, in which the KL was `measured`: coefficient · (1 +
    clip(measured / target - 1, ± 0.2) · rollouts / horizon), the proportional controller of Ziegler et al.
    2019 (arXiv:1909.08593, section 2.2), as in TRL and verl. A step of more rollouts than `horizon` counts as
    `horizon`, so that the coefficient stays above 0."""
    error = max(-LARGEST_ERROR, min(LARGEST_ERROR, measured / target - 1))
    return coefficient * (1 + error * min(1.0, rollouts / horizon))
