"""The trained tokens of a micro-batch or of a whole step, with their log-probabilities under each policy."""

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from trainer_service.algorithms.ratios import widened

Anchor = Literal["prox", "rollout"]
"""The policy in the denominator of a ratio: `prox` is the policy before the step, `rollout` the policy that
sampled."""


@dataclass(frozen=True)
class Tokens:
    """T trained tokens; log-probabilities and entropies are in nats. Only `lp_new_T`, `entropy_T`
    and `teacher_kl_T` have a gradient. Raises ValueError if the tensors differ in shape."""

    lp_new_T: Tensor
    """Under the policy that is trained."""
    lp_prox_T: Tensor
    """Under the policy before the step."""
    lp_roll_T: Tensor
    """As the engine reported it when it sampled the token."""
    advantages_T: Tensor
    rows_T: Tensor
    """The row of each token, numbered as in `StepCounts`; int64. A row is never split between
    micro-batches."""
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
