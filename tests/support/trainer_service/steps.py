"""Hypothesis strategies for optimizer steps (rows, rollouts, groups, log-probabilities) and loss settings."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.trainer_service.canonical import counts_of
from trainer_service.algorithms.aggregation import StepCounts
from trainer_service.algorithms.policy_loss import LossSettings
from trainer_service.algorithms.tokens import Tokens

LOSSES: list[Any] = [
    "ppo",
    "gspo",
    {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "gmpo",
    "cispo",
    "reinforce",
    "importance_sampling",
    "sapo",
    "dppo",
    {"name": "dppo", "form": "logp", "anchor": "prox"},
    {"name": "dppo", "divergence": "kl", "low": 0.05, "high": 0.05, "kappa": 1e-3},
    "ipo",
    "glm5",
    {"name": "dro", "beta": 0.1},
    {"name": "kl_cov", "fraction": 0.3},
    "reverse_kl",
    "ref_kl",
    {"name": "kdrl", "coefficient": 0.1},
    {"name": "kdrl", "coefficient": 0.1, "estimator": "k3"},
    "cross_entropy",
]
CORRECTIONS: list[Any] = [
    "none",
    "tis_token",
    "tis_sequence",
    "icepop",
    {"name": "tis_token", "normalise": True},
    {"name": "tis_sequence", "normalise": True},
    {"name": "icepop", "normalise": True},
]
RATIO_MASKS: list[Any] = [
    "geometric",
    {"name": "geometric", "low": 0.7, "high": 1.4},
    "product",
    {"name": "outlier", "low": 0.4, "high": 2.0},
    {"name": "rejection", "level": "token", "estimator": "k1", "low": 0.5, "high": 2.0},
    {"name": "rejection", "level": "seq_sum", "estimator": "k3", "upper": 0.5},
    {"name": "rejection", "level": "seq_max", "estimator": "k2", "upper": 0.3},
    "m2po",
    {"name": "m2po", "limit": 0.2},
    {"name": "kpop", "upper": 0.05},
]
"""The masks that compare the trainer's log-probabilities with the engine's."""
MASKS: list[Any] = [*RATIO_MASKS, {"name": "opsm", "delta": 0.1}]
KLS = ["abs", "k2", "k3", "low_var", "k3_plus", "unbiased"]
AGGREGATIONS: list[dict[str, Any]] = [
    {"mode": "token_mean"},
    {"mode": "token_sum"},
    {"mode": "seq_mean_token_mean"},
    {"mode": "seq_mean_token_sum"},
    {"mode": "seq_mean_token_sum_norm", "horizon": 7},
    {"mode": "prompt_mean"},
    {"mode": "rollout_mean"},
    {"mode": "fixed_denominator", "denominator": 11},
]


@dataclass(frozen=True)
class Step:
    """All trained tokens of a step, row after row, and the counts of the step."""

    tokens: Tokens
    counts: StepCounts

    def with_tokens(self, **changed: Tensor) -> "Step":
        return Step(replace(self.tokens, **changed), self.counts)


def kind(value: Any) -> str:
    return value if isinstance(value, str) else str(value["name"])


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(str(part) for part in value.values())


@st.composite
def steps(draw: st.DrawFn, spread: float = 0.5) -> Step:
    """Up to six rows of up to five tokens; rows may be empty. Policies differ by about `spread` nats."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    rows = len(lengths)
    rollouts = sorted(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    groups = [rollout // 2 for rollout in rollouts]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tokens = sum(lengths)

    def near(values_T: Tensor) -> Tensor:
        noise_T = torch.randn(tokens, generator=generator, dtype=torch.float64)
        return (values_T + spread * noise_T).clamp(max=-1e-3)

    rows_T = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
    lp_roll_T = near(torch.full((tokens,), -1.0, dtype=torch.float64))
    lp_prox_T = near(lp_roll_T)
    advantages_R = torch.randn(rows, generator=generator, dtype=torch.float64)
    return Step(
        Tokens(
            lp_new_T=near(lp_prox_T).requires_grad_(),
            lp_prox_T=lp_prox_T,
            lp_roll_T=lp_roll_T,
            advantages_T=advantages_R[rows_T],
            rows_T=rows_T,
            lp_ref_T=near(lp_roll_T),
            lp_teacher_T=near(lp_roll_T),
            entropy_T=-near(lp_roll_T),
        ),
        counts_of(rows_T, torch.tensor(rollouts), torch.tensor(groups)),
    )


@st.composite
def ways(draw: st.DrawFn) -> LossSettings:
    """Any loss with any correction, masks, KL and aggregation that may be combined with it."""
    loss = draw(st.sampled_from(LOSSES))
    anchored = LossSettings.model_validate({"loss": loss, "correction": "none"}).loss
    to_rollout = getattr(anchored, "anchor", "prox") == "rollout"
    return LossSettings.model_validate(
        {
            "loss": loss,
            "correction": "none" if to_rollout else draw(st.sampled_from(CORRECTIONS)),
            "masks": draw(st.lists(st.sampled_from(MASKS), max_size=2)),
            "kl": {"estimator": draw(st.sampled_from(KLS)), "coefficient": draw(st.sampled_from([0, 0.1]))},
            "entropy_bonus": draw(st.sampled_from([0, 0.1])),
            "aggregation": draw(st.sampled_from(AGGREGATIONS)),
        }
    )
