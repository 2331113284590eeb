"""Computes one advantage per rollout from the rewards of rollouts; `ADVANTAGES` has the formulas by name.

    Rollouts ─ ADVANTAGES[name].score ─▶ advantages_B ─ to_tokens ─▶ advantages_T (─ whitened, clipped)

B counts rollouts, never rows. Rewards are finite: `Rollout` refuses others. `groups_B` [B] int64 names the
group of each rollout. Advantages are float64, in units of the reward unless a formula divides by a standard
deviation. A formula that compares group members gives exactly 0 to a rollout that is alone in its group, and
to all rollouts of a group with equal rewards. The result does not depend on the numbers that name the groups.
Only `rae` depends on the order of the rollouts.

Names in backticks with a dot, such as `adv.rloo`, are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainer_service.algorithms.advantages import settings as settings
from trainer_service.algorithms.advantages.returns import whitened
from trainer_service.algorithms.advantages.rollouts import Groups, RefusedRollout, Rollouts
from trainer_service.algorithms.advantages.settings import BATCH_EPS, DECAY, EPS


def drgrpo(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """R - mean of the group (Dr. GRPO, arXiv:2503.20783; `adv.drgrpo`)."""
    groups = Groups(groups_B)
    return _compared(rewards_B.double() - groups.mean(rewards_B), rewards_B, groups)


def grpo(rewards_B: Tensor, groups_B: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """(R - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300; `adv.grpo_ddof1`, `adv.grpo_ddof0`)."""
    return drgrpo(rewards_B, groups_B) / (Groups(groups_B).std(rewards_B, ddof) + eps)


def rloo(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """R - mean of the others = n / (n - 1) · (R - mean) (arXiv:2402.14740; `adv.rloo`)."""
    size_B = Groups(groups_B).size_B
    return drgrpo(rewards_B, groups_B) * size_B / (size_B - 1).clamp(min=1)


def liteppo(rewards_B: Tensor, groups_B: Tensor, *, eps: float = BATCH_EPS) -> Tensor:
    """(R - mean of the group) / (standard deviation of these differences over the whole step + eps), ddof 1
    (LitePPO, arXiv:2508.08221; `adv.liteppo_group_mean_batch_std`). The step is all rollouts that are scored
    together, also those that are alone in their group."""
    centred_B = drgrpo(rewards_B, groups_B)
    if len(centred_B) < 2:
        return centred_B
    return centred_B / (centred_B.std(correction=1) + eps)


def opo(rewards_B: Tensor, groups_B: Tensor, lengths_B: Tensor) -> Tensor:
    """R - sum(len · R) / sum(len) of the group. `lengths_B` has the trained tokens of each rollout,
    at least 1. This baseline has the least variance if gradients grow with length (OPO, arXiv:2505.23585;
    `adv.opo`)."""
    groups = Groups(groups_B)
    baseline_B = groups.sum(lengths_B * rewards_B) / groups.sum(lengths_B)
    return _compared(rewards_B.double() - baseline_B, rewards_B, groups)


def gpg(rewards_B: Tensor, groups_B: Tensor, *, f_norm: float = 1.0) -> Tensor:
    """B / (number of rewards other than 0) · (R - mean of the group) / f_norm, with B of the whole step
    (GPG, arXiv:2504.02546; `adv.gpg`)."""
    alpha = len(rewards_B) / max(1, int(torch.count_nonzero(rewards_B)))
    return alpha * drgrpo(rewards_B, groups_B) / f_norm


def maxrl(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """(R - mean) / mean of the group, and 0 if the mean is 0. Rewards must be at least 0 (MaxRL,
    arXiv:2602.02710; `adv.maxrl`)."""
    mean_B = Groups(groups_B).mean(rewards_B)
    return torch.where(mean_B > 0, drgrpo(rewards_B, groups_B) / mean_B, torch.zeros_like(mean_B))


def passk(rewards_B: Tensor, groups_B: Tensor, *, eps: float = EPS) -> Tensor:
    """(best - second best) / (std + eps) for the best of the group, 0 for all others; std with ddof 1
    (pass@k, arXiv:2503.19595; `adv.passk`). If several share the best reward, all get 0."""
    groups, rewards_B = Groups(groups_B), rewards_B.double()
    best_B = rewards_B == groups.high(rewards_B)
    second_B = groups.high(rewards_B.masked_fill(best_B, -torch.inf))
    alone_B = best_B & (groups.sum(best_B) == 1) & (groups.size_B > 1)
    lead_B = torch.where(alone_B, rewards_B - second_B, torch.zeros_like(rewards_B))
    return lead_B / (groups.std(rewards_B, 1) + eps)


def gdpo(parts_BK: Tensor, groups_B: Tensor, weights_K: Tensor, *, eps: float = EPS) -> Tensor:
    """The sum of w · GRPO(part) over the K parts of the reward, ddof 1 (GDPO, arXiv:2601.05242; `adv.gdpo`).
    Afterwards `to_tokens` whitens it over the step's tokens, if the settings ask for it."""
    scores_KB = [grpo(part_B, groups_B, eps=eps) for part_B in parts_BK.unbind(1)]
    return torch.stack(scores_KB, dim=1) @ weights_K.double()


def rae(
    rewards_B: Tensor, agents: Sequence[str], *, baselines: Mapping[str, float], decay: float = DECAY
) -> tuple[Tensor, dict[str, float]]:
    """R - b, where b is the baseline of the rollout's agent (role-conditioned advantage estimation, SPIRAL,
    arXiv:2506.24119; `adv.rae`). Also returns the baselines after all rollouts.

    Rollouts are scored in order. After each rollout, the baseline of its agent becomes
    decay · b + (1 - decay) · R. The baseline of an unknown agent is 0. This estimator needs no group. It is
    the only one with a state: the checkpoint that contains the step must contain the baselines."""
    updated, advantages = dict(baselines), []
    for reward, agent in zip(rewards_B.tolist(), agents, strict=True):
        baseline = updated.get(agent, 0.0)
        advantages.append(reward - baseline)
        updated[agent] = decay * baseline + (1 - decay) * reward
    return torch.tensor(advantages, dtype=torch.float64), updated


def to_tokens(
    advantages_B: Tensor, chosen: object, rollout_R: Tensor, rows_T: Tensor, *, bound: float | None = None
) -> Tensor:
    """[T] float64: gives each trained token of the step the advantage of its rollout.

    `rollout_R` gives the rollout of each row, and `rows_T` the row of each token. If the settings `chosen`
    ask for it, the advantages are whitened over the step's tokens. Then they are clipped to ± bound."""
    advantages_T = advantages_B[rollout_R][rows_T]
    if isinstance(chosen, settings.Gdpo | settings.ReinforcePpBaseline) and chosen.whiten:
        advantages_T = whitened(advantages_T)
    return advantages_T if bound is None else advantages_T.clamp(-bound, bound)


def _compared(advantages_B: Tensor, rewards_B: Tensor, groups: Groups) -> Tensor:
    """The advantages, but exactly 0 where all rewards of a group are equal. There, R - mean is only a
    rounding error, which a division by the deviation of about 0 would make large."""
    return torch.where(groups.spread(rewards_B) > 0, advantages_B, torch.zeros_like(advantages_B))


Need = Literal["parts", "baselines"]


@dataclass(frozen=True)
class AdvantageKind:
    """One way to give each rollout an advantage."""

    settings: type[Any]
    score: Callable[[Rollouts, Any], Tensor]
    """Returns [B] float64. Raises RefusedRollout for a rollout that the formula does not allow."""
    needs: frozenset[Need] = frozenset()
    compares: bool = True
    """Whether the members of a group are compared, so that a group with equal rewards has no advantages."""
    whole_step: bool = False
    """Whether all rollouts of the optimizer step must be scored in one call. If not, each group can be scored
    in a call of its own."""


def baselines_after(rollouts: Rollouts, chosen: settings.Rae) -> dict[str, float]:
    """The baselines of `rae` after these rollouts are trained."""
    return _rae(rollouts, chosen)[1]


def _rae(rollouts: Rollouts, chosen: settings.Rae) -> tuple[Tensor, dict[str, float]]:
    agents = [member.agent for member in rollouts.members]
    return rae(rollouts.rewards, agents, baselines=rollouts.baselines, decay=chosen.decay)


def _opo(rollouts: Rollouts, _: settings.Plain) -> Tensor:
    for member in rollouts.members:
        if member.output_tokens < 1:
            raise RefusedRollout(member.rollout_id, "opo weighs it by its trained tokens, and it has none")
    return opo(rollouts.rewards, rollouts.groups, rollouts.output_tokens)


def _maxrl(rollouts: Rollouts, _: settings.Plain) -> Tensor:
    for member in rollouts.members:
        if member.reward < 0:
            raise RefusedRollout(
                member.rollout_id, f"maxrl takes no reward below 0, but it got {member.reward}"
            )
    return maxrl(rollouts.rewards, rollouts.groups)


def _gdpo(rollouts: Rollouts, chosen: settings.Gdpo) -> Tensor:
    weights_K = torch.tensor(list(chosen.weights.values()), dtype=torch.float64)
    return gdpo(rollouts.parts(list(chosen.weights)), rollouts.groups, weights_K, eps=chosen.eps)


def _drgrpo(rollouts: Rollouts, _: Any) -> Tensor:
    return drgrpo(rollouts.rewards, rollouts.groups)


def _grpo(rollouts: Rollouts, chosen: settings.Grpo) -> Tensor:
    return grpo(rollouts.rewards, rollouts.groups, ddof=chosen.ddof, eps=chosen.eps)


ADVANTAGES: Mapping[str, AdvantageKind] = {
    "drgrpo": AdvantageKind(settings.Plain, _drgrpo),
    "grpo_ddof1": AdvantageKind(settings.Grpo, _grpo),
    "grpo_ddof0": AdvantageKind(settings.Grpo, _grpo),
    "rloo": AdvantageKind(settings.Plain, lambda b, _: rloo(b.rewards, b.groups)),
    "liteppo": AdvantageKind(
        settings.Liteppo, lambda b, s: liteppo(b.rewards, b.groups, eps=s.eps), whole_step=True
    ),
    "opo": AdvantageKind(settings.Plain, _opo),
    "gpg": AdvantageKind(
        settings.Gpg, lambda b, s: gpg(b.rewards, b.groups, f_norm=s.f_norm), whole_step=True
    ),
    "maxrl": AdvantageKind(settings.Plain, _maxrl),
    "passk": AdvantageKind(settings.Passk, lambda b, s: passk(b.rewards, b.groups, eps=s.eps)),
    "gdpo": AdvantageKind(settings.Gdpo, _gdpo, needs=frozenset({"parts"})),
    "reinforce_pp_baseline": AdvantageKind(settings.ReinforcePpBaseline, _drgrpo),
    "rae": AdvantageKind(
        settings.Rae,
        lambda b, s: _rae(b, s)[0],
        needs=frozenset({"baselines"}),
        compares=False,
        whole_step=True,
    ),
}
"""The estimators with one advantage per rollout; `returns.RETURNS` are those with one per token."""
