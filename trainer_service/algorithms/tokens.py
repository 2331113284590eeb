"""The trained tokens of a micro-batch or of a whole step, and the arithmetic of their log-probabilities.

    Tokens ─┬─ ratio, bernoulli_kl ─▶ bounded ratios and divergences of two policies, in float32 or better
            ├─ RowIndex ─▶ sums, means and maxima of rows, and a row's value at its tokens
            └─ loglinear ─▶ an approximation of the policy before the step, without a forward pass

`mask.kpop_binary_kl` and `prox.loglinear` are cases of `algorithms_golden.json` in the tests.
"""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats. Log-ratios are clipped to ± this value, and have gradient 0 outside."""
MAX_LOGPROB = -1e-7
"""Nats. `bernoulli_kl` clips log-probabilities p to at most this value, so that log(1 - exp(p)) is finite."""


def widened(values: Tensor) -> Tensor:
    """The values in float32; values in float64 stay as they are."""
    return values if values.dtype == torch.float64 else values.float()


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio, clipped to ± `LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(lp_upper_T: Tensor, lp_lower_T: Tensor) -> Tensor:
    """[T] exp(clip(lp_upper - lp_lower, ± 20)). The ratio of the new policy to the old is called r, that of
    the trainer to the engine rho."""
    return bounded(lp_upper_T - lp_lower_T).exp()


def bernoulli_kl(lp_p_T: Tensor, lp_q_T: Tensor) -> Tensor:
    """[T] in nats: KL(p ‖ q) of the two outcomes "this token" and "any other token": p log(p/q) + (1-p)
    log((1-p)/(1-q)) (DPPO, arXiv:2602.04879; `mask.kpop_binary_kl`)."""
    lp_p_T, lp_q_T = lp_p_T.clamp(max=MAX_LOGPROB), lp_q_T.clamp(max=MAX_LOGPROB)
    other_p_T, other_q_T = -torch.expm1(lp_p_T), -torch.expm1(lp_q_T)
    return lp_p_T.exp() * (lp_p_T - lp_q_T) + other_p_T * (other_p_T.log() - other_q_T.log())


Anchor = Literal["prox", "rollout"]
"""The policy in the denominator of a ratio: `prox` is the policy before the step, `rollout` the policy that
sampled."""


@dataclass(frozen=True)
class Tokens:
    """T trained tokens; log-probabilities and entropies are in nats. Only `lp_new_T`, `entropy_T` and
    `teacher_kl_T` have a gradient. Raises ValueError if the tensors differ in shape."""

    lp_new_T: Tensor
    """Under the policy that is trained."""
    lp_prox_T: Tensor
    """Under the policy before the step."""
    lp_roll_T: Tensor
    """As the engine reported it when it sampled the token."""
    advantages_T: Tensor
    rows_T: Tensor
    """The row of each token, numbered as in `StepCounts`; int64. No row is split between micro-batches."""
    lp_ref_T: Tensor | None = None
    lp_teacher_T: Tensor | None = None
    entropy_T: Tensor | None = None
    teacher_kl_T: Tensor | None = None
    """`top_k_kl` to the teacher."""
    fresh_T: Tensor | None = None
    """bool: False for a token that is too old to be learned from. None: all are young enough."""

    def __post_init__(self) -> None:
        shape = self.lp_new_T.shape
        for name, values_T in self.given().items():
            if values_T.dim() != 1 or values_T.shape != shape:
                raise ValueError(f"{name} has shape {list(values_T.shape)}, but lp_new_T has {list(shape)}")

    def given(self) -> dict[str, Tensor]:
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: values_T for name, values_T in every.items() if values_T is not None}

    @property
    def finite(self) -> Tensor:
        """[T] bool: whether all log-probabilities of a token are finite. Then its ratios are finite too."""
        known = [values_T for name, values_T in self.given().items() if name.startswith("lp_")]
        return torch.stack([torch.isfinite(values_T) for values_T in known]).all(dim=0)

    @property
    def fresh(self) -> Tensor:
        return torch.ones_like(self.rows_T, dtype=torch.bool) if self.fresh_T is None else self.fresh_T

    @property
    def log_rho(self) -> Tensor:
        """[T] in nats: lp_prox - lp_roll."""
        return self.lp_prox_T - self.lp_roll_T

    def at(self, chosen_T: Tensor) -> "Tokens":
        """The chosen tokens, in float32 or better. Those with a gradient keep it."""
        learns = ("lp_new_T", "entropy_T", "teacher_kl_T")
        parts = {
            name: (values_T if name in learns else values_T.detach())[chosen_T]
            for name, values_T in self.given().items()
        }
        exact = {name: parts.pop(name) for name in ("rows_T", "fresh_T") if name in parts}
        return Tokens(**exact, **{name: widened(values_T) for name, values_T in parts.items()})

    def anchor(self, anchor: Anchor) -> Tensor:
        """[T] log-probabilities under the policy in the denominator of ratios."""
        return self.lp_prox_T if anchor == "prox" else self.lp_roll_T

    def reference(self) -> Tensor:
        if self.lp_ref_T is None:
            raise ValueError("a KL to the reference policy needs lp_ref_T")
        return self.lp_ref_T

    def teacher(self) -> Tensor:
        if self.lp_teacher_T is None:
            raise ValueError("distillation needs lp_teacher_T")
        return self.lp_teacher_T

    def teacher_kl(self) -> Tensor:
        if self.teacher_kl_T is None:
            raise ValueError("distillation from the teacher's top tokens needs teacher_kl_T")
        return self.teacher_kl_T


@dataclass(frozen=True)
class RowIndex:
    """The R rows of T tokens. Row numbers may have gaps, and may come in any order."""

    of_T: Tensor
    """The index of each token's row, in [0, R); int64."""
    lengths_R: Tensor

    @classmethod
    def of(cls, rows_T: Tensor) -> "RowIndex":
        _, of_T, lengths_R = torch.unique(rows_T, return_inverse=True, return_counts=True)
        return cls(of_T, lengths_R)

    def sum(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(len(self.lengths_R)).index_add(0, self.of_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        return self.sum(values_T) / self.lengths_R

    def largest(self, values_T: Tensor) -> Tensor:
        some_R = values_T.new_empty(len(self.lengths_R))  # each row has a token, so no value of it stays
        return some_R.scatter_reduce(0, self.of_T, values_T, "amax", include_self=False)

    def any(self, flags_T: Tensor) -> Tensor:
        found_R: Tensor = self.sum(flags_T.to(torch.int64)) > 0
        return found_R

    def at_tokens(self, values_R: Tensor) -> Tensor:
        """[T]: the value of each token's row."""
        return values_R[self.of_T]


def loglinear(lp_new_T: Tensor, lp_roll_T: Tensor, versions_T: Tensor, *, version: int) -> Tensor:
    """[T] in nats, without gradient: lp_roll + alpha (lp_new - lp_roll), with alpha from
    `interpolation_weight` (AReaL's `loglinear`; `prox.loglinear`). `version` is what the step makes."""
    alpha_T = interpolation_weight(versions_T, version=version).to(lp_new_T.dtype)
    return (lp_roll_T + alpha_T * (lp_new_T - lp_roll_T)).detach()


def interpolation_weight(versions_T: Tensor, *, version: int) -> Tensor:
    """[T] float64 in [0, 1): alpha = (v - 1 - b) / (v - b) for a token that version b sampled, in the step
    that makes version v. For b >= v - 1 it is 0, since the step begins with version v - 1."""
    age_T = (version - versions_T).double()
    return (age_T - 1).clamp(min=0) / age_T.clamp(min=1)
