"""Computes the metrics of one optimizer step: mismatch of trainer and engine, clipping, staleness, critic.

tokens of a micro-batch ─ token_sums ─▶ Sums ─ joined over micro-batches and ranks ─▶ diagnostics

`metrics.mismatch` and `async.prime_staleness` are cases of `algorithms_golden.json` in the tests.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_service.algorithms.policy_loss import PolicyLoss
from trainer_service.algorithms.returns import ValueLoss
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import RowIndex, Tokens, bounded
from trainer_service.model.routers import router_metrics


class Staleness(NamedTuple):
    """For each of R rows, numbers of versions between its sampling and the step that trains it; int64."""

    total_R: Tensor
    in_flight_R: Tensor
    """Between the row's oldest and newest token."""
    in_queue_R: Tensor
    """Between the row's newest token and the step."""


def staleness(version: int, first_R: Tensor, last_R: Tensor) -> Staleness:
    """The staleness of rows in a step that begins with `version`. `first_R` and `last_R` are the oldest and
    newest versions that sampled their tokens (prime-rl, where the step is numbered version + 1;
    `async.prime_staleness`)."""
    total_R = (version - first_R).clamp(min=0)
    in_flight_R = torch.minimum(total_R, (last_R - first_R).clamp(min=0))
    return Staleness(total_R, in_flight_R, total_R - in_flight_R)


MEANS = (
    "kl",
    "kl_current",
    "k3",
    "abs_logp",
    "abs_logp_current",
    "train_ppl",
    "rollout_ppl",
    "log_ppl",
    "abs_log_ppl",
    "ppl_ratio",
)


def mismatch_sums(
    lp_train_T: Tensor, lp_roll_T: Tensor, rows_T: Tensor, current_T: Tensor | None = None
) -> Sums:
    """The sums over T tokens, and over whole rows, that `mismatch` needs. T must be at least 1, and all
    log-probabilities finite, in nats. `current_T` are the tokens that the present version sampled."""
    lp_train_T, lp_roll_T = lp_train_T.double(), lp_roll_T.double()
    log_rho_T = lp_train_T - lp_roll_T
    rho_T = bounded(log_rho_T).exp()
    rows = RowIndex.of(rows_T)
    total_R, mean_R = rows.sum(log_rho_T), rows.mean(log_rho_T)
    own_T = log_rho_T[:0] if current_T is None else log_rho_T[current_T]
    current = {"mismatch/abs_logp_current": own_T.abs(), "mismatch/kl_current": -own_T}
    return Sums.of(
        {
            **(current if own_T.numel() else {}),
            "mismatch/kl": -log_rho_T,
            "mismatch/k3": rho_T - log_rho_T - 1,
            "mismatch/abs_logp": log_rho_T.abs(),
            "mismatch/train_ppl": (-rows.mean(lp_train_T)).exp(),
            "mismatch/rollout_ppl": (-rows.mean(lp_roll_T)).exp(),
            "mismatch/log_ppl": -mean_R,
            "mismatch/abs_log_ppl": mean_R.abs(),
            "mismatch/ppl_ratio": (-mean_R).exp(),
            "mismatch/rho": rho_T,
            "mismatch/rho_squared": rho_T**2,
            "mismatch/rho_of_row_squared": bounded(2 * total_R).exp(),
        },
        largest={"mismatch/rho": rho_T, "mismatch/minus_rho": -rho_T},
    )


def mismatch(sums: Sums) -> dict[str, float]:
    """The metrics by name: means over tokens, and over rows for perplexities and `chi2_seq` (verl's rollout
    correction metrics; `metrics.mismatch`). None if no token had finite log-probabilities; without
    `abs_logp_current` and `kl_current` if no token was current."""
    if "mismatch/rho" not in sums.totals:
        return {}
    return {
        **{name: sums.mean(name) for each in MEANS if (name := f"mismatch/{each}") in sums.totals},
        "mismatch/chi2_token": sums.mean("mismatch/rho_squared") - 1,
        "mismatch/chi2_seq": sums.mean("mismatch/rho_of_row_squared") - 1,
        "mismatch/ess": sums.mean("mismatch/rho") ** 2 / sums.mean("mismatch/rho_squared"),
        "mismatch/rho_max": sums.largest["mismatch/rho"],
        "mismatch/rho_min": -sums.largest["mismatch/minus_rho"],
    }


TOTALS = ("loss", "is/nonfinite")
"""The metrics that are sums. Those in `largest` are maxima, and the others are means over tokens or rows."""


class SampledTokens(NamedTuple):
    """Values of T trained tokens beside those in `Tokens`."""

    lp_begin_T: Tensor
    """Log-probabilities before the step, in nats; `Tokens.lp_prox_T` may only approximate them."""
    entropy_T: Tensor
    """In nats."""
    versions_T: Tensor
    """As `Row.versions_L`."""


def token_sums(tokens: Tokens, sampled: SampledTokens, losses: PolicyLoss, version: int) -> Sums:
    """The sums over the tokens of a micro-batch, of whole rows. `version` is that of the weights before the
    step. They have no gradient."""
    rows = RowIndex.of(tokens.rows_T)
    ages = staleness(version, -rows.largest(-sampled.versions_T), rows.largest(sampled.versions_T))
    ages_R = {f"staleness/{name.removesuffix('_R')}": age_R for name, age_R in ages._asdict().items()}
    fresh_T = tokens.fresh
    means = {
        "loss": losses.aggregation_T * losses.per_token_T,
        "kl/reference": losses.kl_T,
        "is/mean": losses.weight_T,
        "is/capped_frac": losses.capped_T,
        "is/masked_frac": ~losses.kept_T,
        "is/nonfinite": ~losses.finite_T,
        "staleness/masked_frac": ~fresh_T,
        "ppo/clip_hi": losses.clipped_high_T,
        "ppo/clip_lo": losses.clipped_low_T,
        "ppo/dual": losses.dual_T,
        "ppo/dropped": losses.dropped_T,
        "ppo/ratio_mean": losses.ratio_T,
        "ppo/kl": -losses.ratio_T.log(),
        "adv/zero_frac": tokens.advantages_T == 0,
        "entropy": sampled.entropy_T.detach(),
        **{f"{name}_mean": age_R for name, age_R in ages_R.items()},
    }
    largest = {"is/max": losses.weight_T, **{f"{name}_max": age_R for name, age_R in ages_R.items()}}
    own = Sums.of(means, largest, spread={"adv/mean": tokens.advantages_T})
    finite_T = losses.finite_T
    if not bool(finite_T.any()):
        return own
    lp_T = (sampled.lp_begin_T.detach()[finite_T], tokens.lp_roll_T[finite_T])
    current_T = sampled.versions_T[finite_T] == version
    return Sums.joined([own, mismatch_sums(*lp_T, tokens.rows_T[finite_T], current_T)])


def diagnostics(step: Sums) -> dict[str, float]:
    """The metrics of the step's tokens, by name, from the `token_sums` of all its micro-batches."""
    means = [name for name in step.totals if name not in TOTALS and not name.startswith("mismatch/")]
    return {
        **mismatch(step),
        **{name: step.totals[name] for name in TOTALS},
        **{name: step.mean(name) for name in means},
        **{name: value for name, value in step.largest.items() if not name.startswith("mismatch/")},
        "adv/std": math.sqrt(step.variance("adv/mean")),
        **router_metrics(step),
    }


def critic_sums(values_T: Tensor, returns_T: Tensor, losses: ValueLoss) -> Sums:
    """The sums over T tokens. `values_T` are the critic's values before the step, in units of the reward."""
    return Sums.of(
        {
            "critic/loss": losses.per_token_T.detach(),
            "critic/clip_frac": losses.clipped_T,
            "critic/value_mean": values_T,
        },
        spread={"critic/return_mean": returns_T, "unexplained": returns_T - values_T},
    )


def critic_metrics(step: Sums) -> dict[str, float]:
    """The metrics of the critic, by name.

    The explained variance is 1 - var(R - V) / var(R). It is 1 for exact values, 0 for constant values, and
    negative for values that are worse than a constant. If all returns are equal, it is 0."""
    total, unexplained = step.variance("critic/return_mean"), step.variance("unexplained")
    return {
        **{name: step.mean(name) for name in step.totals if name != "unexplained"},
        "critic/explained_variance": 1 - unexplained / total if total > 0 else 0.0,
    }
