"""What one optimizer step says of itself: trainer against engine, clipping, staleness."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer_service.loss import TokenLosses


@dataclass(frozen=True)
class Observed:
    """The trained tokens of a step, flat [T], without gradient; micro-batches concatenate."""

    lp_prox_T: Tensor
    lp_roll_T: Tensor
    advantages_T: Tensor
    entropy_T: Tensor
    versions_T: Tensor
    rows_T: Tensor
    per_token_T: Tensor
    ratio_T: Tensor
    weight_T: Tensor
    clipped_high_T: Tensor
    clipped_low_T: Tensor
    dual_T: Tensor
    kept_T: Tensor

    @classmethod
    def of(
        cls,
        losses: TokenLosses,
        *,
        lp_prox_T: Tensor,
        lp_roll_T: Tensor,
        advantages_T: Tensor,
        entropy_T: Tensor,
        versions_T: Tensor,
        rows_T: Tensor,
    ) -> "Observed":
        return cls(
            lp_prox_T=lp_prox_T.detach(),
            lp_roll_T=lp_roll_T,
            advantages_T=advantages_T,
            entropy_T=entropy_T,
            versions_T=versions_T,
            rows_T=rows_T,
            per_token_T=losses.per_token_T,
            ratio_T=losses.ratio_T,
            weight_T=losses.weight_T,
            clipped_high_T=losses.clipped_high_T,
            clipped_low_T=losses.clipped_low_T,
            dual_T=losses.dual_T,
            kept_T=losses.kept_T,
        )

    def cpu(self) -> "Observed":
        return Observed(**{field.name: getattr(self, field.name).cpu() for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence["Observed"]) -> "Observed":
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def mismatch(lp_train_T: Tensor, lp_roll_T: Tensor, rows_T: Tensor) -> dict[str, float]:
    """How the trainer's logprobs differ from the engine's of the same tokens (`metrics.mismatch`)."""
    log_rho_T = (lp_train_T - lp_roll_T).double()
    rho_T = log_rho_T.clamp(-20, 20).exp()
    row_T = torch.searchsorted(_distinct(rows_T), rows_T)
    lengths_B = torch.bincount(row_T).double()
    total_B = torch.zeros_like(lengths_B).index_add_(0, row_T, log_rho_T)
    return {
        "mismatch/kl": float(-log_rho_T.mean()),
        "mismatch/k3": float((rho_T - log_rho_T - 1).mean()),
        "mismatch/abs_logp": float(log_rho_T.abs().mean()),
        "mismatch/ppl_ratio": float((-total_B / lengths_B).exp().mean()),
        "mismatch/chi2_token": float((rho_T**2).mean() - 1),
        "mismatch/chi2_seq": float((2 * total_B).clamp(-20, 20).exp().mean() - 1),
        "mismatch/ess": float(rho_T.sum() ** 2 / (len(rho_T) * (rho_T**2).sum())),
    }


def diagnostics(seen: Observed, version: int, tis_cap: float | None) -> dict[str, float]:
    """Everything that is true of the step's tokens, by the names that the metrics carry."""
    capped_T = seen.kept_T & (seen.weight_T >= (tis_cap if tis_cap is not None else torch.inf))
    ages = [staleness(version, *_span(seen.versions_T[seen.rows_T == row])) for row in _distinct(seen.rows_T)]
    return {
        **mismatch(seen.lp_prox_T, seen.lp_roll_T, seen.rows_T),
        "loss": float(seen.per_token_T.mean()),
        "is/mean": float(seen.weight_T.mean()),
        "is/max": float(seen.weight_T.max()),
        "is/capped_frac": _mean(capped_T),
        "is/masked_frac": _mean(~seen.kept_T),
        "ppo/clip_hi": _mean(seen.clipped_high_T),
        "ppo/clip_lo": _mean(seen.clipped_low_T),
        "ppo/dual": _mean(seen.dual_T),
        "ppo/ratio_mean": float(seen.ratio_T.mean()),
        "ppo/kl": float(-seen.ratio_T.log().mean()),
        "adv/mean": float(seen.advantages_T.mean()),
        "adv/std": float(seen.advantages_T.std(correction=0)),
        "adv/zero_frac": _mean(seen.advantages_T == 0),
        "entropy": float(seen.entropy_T.mean()),
        **_mean_and_max("staleness/total", [total for total, _, _ in ages]),
        **_mean_and_max("staleness/in_flight", [in_flight for _, in_flight, _ in ages]),
        **_mean_and_max("staleness/in_queue", [in_queue for _, _, in_queue in ages]),
    }


def staleness(version: int, first: int, last: int) -> tuple[int, int, int]:
    """Versions that passed since a row's first token: in all, while it was sampled, and while it waited
    (`async.prime_staleness`, where the step is one more than the version that it starts from)."""
    total = max(0, version - first)
    in_flight = min(total, max(0, last - first))
    return total, in_flight, total - in_flight


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
