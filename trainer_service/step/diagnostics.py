"""What one optimizer step says of itself: trainer against engine, clipping, staleness."""

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
class Observed:
    """The trained tokens of a step, flat [T], without gradient; micro-batches concatenate."""

    lp_begin_T: Tensor
    lp_roll_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor
    versions_T: Tensor
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
    ) -> "Observed":
        """`lp_begin_T` is what the step begins with; in `tokens` a guess may stand for it."""
        of_tokens = {name: values_T.detach() for name, values_T in tokens.given().items()}
        of_losses = {field.name: getattr(losses, field.name) for field in fields(losses)}
        every = of_tokens | of_losses | {"entropy_T": entropy_T.detach(), "versions_T": versions_T}
        every["lp_begin_T"] = lp_begin_T.detach()
        return cls(**{field.name: every[field.name] for field in fields(cls)})

    def cpu(self) -> "Observed":
        return Observed(**{field.name: getattr(self, field.name).cpu() for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence["Observed"]) -> "Observed":
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class Criticised(NamedTuple):
    """What the critic expected of a step's tokens, and what came, flat [T], without gradient."""

    values_T: Tensor
    """Before the step."""
    returns_T: Tensor
    per_token_T: Tensor
    clipped_T: Tensor

    def cpu(self) -> "Criticised":
        return Criticised(*(values_T.detach().cpu() for values_T in self))

    @classmethod
    def joined(cls, parts: Sequence["Criticised"]) -> "Criticised":
        return cls(*(torch.cat(values) for values in zip(*parts, strict=True)))


def of_critic(seen: Criticised) -> dict[str, float]:
    """How well it knew what was to come. The explained variance is 1 - var(R - V) / var(R): 1 where it knew,
    0 where a constant would have done as well; and 0 where all returns are the same."""
    spread = float(seen.returns_T.double().var(correction=0))
    missed = float((seen.returns_T - seen.values_T).double().var(correction=0))
    return {
        "critic/loss": float(seen.per_token_T.mean()),
        "critic/clip_frac": _mean(seen.clipped_T),
        "critic/value_mean": float(seen.values_T.mean()),
        "critic/return_mean": float(seen.returns_T.mean()),
        "critic/explained_variance": 1 - missed / spread if spread > 0 else 0.0,
    }


def diagnostics(seen: Observed, version: int) -> dict[str, float]:
    """Everything that is true of the step's tokens, by the names that the metrics carry (spec §7)."""
    finite_T = seen.finite_T
    told = (
        mismatch(seen.lp_begin_T[finite_T], seen.lp_roll_T[finite_T], seen.rows_T[finite_T])
        if bool(finite_T.any())
        else {}
    )
    ages = [staleness(version, *_span(seen.versions_T[seen.rows_T == row])) for row in _distinct(seen.rows_T)]
    return {
        **told,
        "loss": float((seen.aggregation_T * seen.per_token_T).sum()),
        "kl/reference": float(seen.kl_T.mean()),
        "is/mean": float(seen.weight_T.mean()),
        "is/max": float(seen.weight_T.max()),
        "is/capped_frac": _mean(seen.capped_T),
        "is/masked_frac": _mean(~seen.kept_T),
        "is/nonfinite": float((~finite_T).sum()),
        "staleness/masked_frac": _mean(~seen.fresh_T),
        "ppo/clip_hi": _mean(seen.clipped_high_T),
        "ppo/clip_lo": _mean(seen.clipped_low_T),
        "ppo/dual": _mean(seen.dual_T),
        "ppo/dropped": _mean(seen.dropped_T),
        "ppo/ratio_mean": float(seen.ratio_T.mean()),
        "ppo/kl": float(-seen.ratio_T.log().mean()),
        "adv/mean": float(seen.advantages_T.mean()),
        "adv/std": float(seen.advantages_T.std(correction=0)),
        "adv/zero_frac": _mean(seen.advantages_T == 0),
        "entropy": float(seen.entropy_T.mean()),
        **_mean_and_max("staleness/total", [age.total for age in ages]),
        **_mean_and_max("staleness/in_flight", [age.in_flight for age in ages]),
        **_mean_and_max("staleness/in_queue", [age.in_queue for age in ages]),
    }


def _span(versions_T: Tensor) -> tuple[int, int]:
    return int(versions_T.min()), int(versions_T.max())


def _mean_and_max(name: str, values: Sequence[int]) -> dict[str, float]:
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": float(max(values))}


def _distinct(rows_T: Tensor) -> Tensor:
    """Row numbers, ascending, each once."""
    distinct: Tensor = torch.unique_consecutive(rows_T.sort().values)
    return distinct


def _mean(flags_T: Tensor) -> float:
    return float(flags_T.double().mean())
