"""Computes the metrics of one optimizer step: mismatch of trainer and engine, clipping, staleness, critic."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_service.algorithms.corrections.mismatch import mismatch
from trainer_service.algorithms.policy_loss import PolicyLoss
from trainer_service.algorithms.staleness import staleness
from trainer_service.algorithms.tokens import Tokens


@dataclass(frozen=True)
class TokenDiagnostics:
    """Values of the T trained tokens of a step, concatenated over its micro-batches, without gradient.
    `Tokens` and `PolicyLoss` describe the fields that have no text here."""

    lp_begin_T: Tensor
    """Log-probabilities under the weights before the step, in nats."""
    lp_roll_T: Tensor
    """Log-probabilities that the engine reported when it sampled, in nats."""
    advantages_T: Tensor
    entropy_T: Tensor
    """In nats."""
    versions_T: Tensor
    """The version of the weights that sampled each token."""
    rows_T: Tensor
    per_token_T: Tensor
    aggregation_T: Tensor
    kl_T: Tensor
    ratio_T: Tensor
    weight_T: Tensor
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    dropped_T: Tensor
    capped_T: Tensor
    kept_T: Tensor
    finite_T: Tensor
    fresh_T: Tensor

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        losses: PolicyLoss,
        *,
        lp_begin_T: Tensor,
        entropy_T: Tensor,
        versions_T: Tensor,
    ) -> "TokenDiagnostics":
        """`lp_begin_T` is computed with the weights before the step; `tokens.lp_prox_T` may only approximate
        it."""
        of_tokens = {name: values_T.detach() for name, values_T in tokens.given().items()}
        of_losses = {field.name: getattr(losses, field.name) for field in fields(losses)}
        every = of_tokens | of_losses | {"entropy_T": entropy_T.detach(), "versions_T": versions_T}
        every["lp_begin_T"] = lp_begin_T.detach()
        return cls(**{field.name: every[field.name] for field in fields(cls)})

    def cpu(self) -> "TokenDiagnostics":
        return TokenDiagnostics(**{field.name: getattr(self, field.name).cpu() for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence["TokenDiagnostics"]) -> "TokenDiagnostics":
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class CriticDiagnostics(NamedTuple):
    """The critic's values and targets for the T trained tokens of a step, flat and without gradient."""

    values_T: Tensor
    """The critic's values before the step, in units of the reward."""
    returns_T: Tensor
    per_token_T: Tensor
    clipped_T: Tensor

    def cpu(self) -> "CriticDiagnostics":
        return CriticDiagnostics(*(values_T.detach().cpu() for values_T in self))

    @classmethod
    def joined(cls, parts: Sequence["CriticDiagnostics"]) -> "CriticDiagnostics":
        return cls(*(torch.cat(values) for values in zip(*parts, strict=True)))


def critic_metrics(step: CriticDiagnostics) -> dict[str, float]:
    """The metrics of the critic, by name.

    The explained variance is 1 - var(R - V) / var(R). It is 1 for exact values, 0 for constant values, and
    negative for values that are worse than a constant. If all returns are equal, it is 0."""
    total = float(step.returns_T.double().var(correction=0))
    unexplained = float((step.returns_T - step.values_T).double().var(correction=0))
    return {
        "critic/loss": float(step.per_token_T.mean()),
        "critic/clip_frac": _mean(step.clipped_T),
        "critic/value_mean": float(step.values_T.mean()),
        "critic/return_mean": float(step.returns_T.mean()),
        "critic/explained_variance": 1 - unexplained / total if total > 0 else 0.0,
    }


def diagnostics(step: TokenDiagnostics, version: int) -> dict[str, float]:
    """The metrics of the step's tokens, by name. `version` is the version of the weights before the step."""
    finite_T = step.finite_T
    mismatches = (
        mismatch(step.lp_begin_T[finite_T], step.lp_roll_T[finite_T], step.rows_T[finite_T])
        if bool(finite_T.any())
        else {}
    )
    ages = [staleness(version, *_span(step.versions_T[step.rows_T == row])) for row in _distinct(step.rows_T)]
    return {
        **mismatches,
        "loss": float((step.aggregation_T * step.per_token_T).sum()),
        "kl/reference": float(step.kl_T.mean()),
        "is/mean": float(step.weight_T.mean()),
        "is/max": float(step.weight_T.max()),
        "is/capped_frac": _mean(step.capped_T),
        "is/masked_frac": _mean(~step.kept_T),
        "is/nonfinite": float((~finite_T).sum()),
        "staleness/masked_frac": _mean(~step.fresh_T),
        "ppo/clip_hi": _mean(step.clipped_high_T),
        "ppo/clip_lo": _mean(step.clipped_low_T),
        "ppo/dual": _mean(step.dual_T),
        "ppo/dropped": _mean(step.dropped_T),
        "ppo/ratio_mean": float(step.ratio_T.mean()),
        "ppo/kl": float(-step.ratio_T.log().mean()),
        "adv/mean": float(step.advantages_T.mean()),
        "adv/std": float(step.advantages_T.std(correction=0)),
        "adv/zero_frac": _mean(step.advantages_T == 0),
        "entropy": float(step.entropy_T.mean()),
        **_mean_and_max("staleness/total", [age.total for age in ages]),
        **_mean_and_max("staleness/in_flight", [age.in_flight for age in ages]),
        **_mean_and_max("staleness/in_queue", [age.in_queue for age in ages]),
    }


def _span(versions_T: Tensor) -> tuple[int, int]:
    return int(versions_T.min()), int(versions_T.max())


def _mean_and_max(name: str, values: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": float(max(values))}


def _distinct(rows_T: Tensor) -> Tensor:
    """The row numbers, ascending, without repetition."""
    distinct: Tensor = torch.unique_consecutive(rows_T.sort().values)
    return distinct


def _mean(flags_T: Tensor) -> float:
    return float(flags_T.double().mean())
