"""Computes the metrics of one optimizer step: mismatch of trainer and engine, clipping, staleness, critic.

tokens of a micro-batch ─ token_sums ─▶ Sums ─ joined over micro-batches and ranks ─▶ diagnostics
"""

import math
from typing import NamedTuple

from torch import Tensor

from trainer_service.algorithms.corrections.mismatch import mismatch, mismatch_sums
from trainer_service.algorithms.critic import ValueLoss
from trainer_service.algorithms.policy_loss import PolicyLoss
from trainer_service.algorithms.routing import router_metrics
from trainer_service.algorithms.row_index import RowIndex
from trainer_service.algorithms.staleness import staleness
from trainer_service.algorithms.sums import Sums
from trainer_service.algorithms.tokens import Tokens

TOTALS = ("loss", "is/nonfinite")
"""The metrics that are sums. Those in `largest` are maxima, and the others are means over tokens or rows."""


class SampledTokens(NamedTuple):
    """Values of T trained tokens beside those in `Tokens`."""

    lp_begin_T: Tensor
    """Log-probabilities under the weights before the step, in nats; `lp_prox_T` may only approximate it."""
    entropy_T: Tensor
    """In nats."""
    versions_T: Tensor
    """The version of the weights that sampled each token."""


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
