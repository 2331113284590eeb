"""From the rewards of rollouts to one advantage per rollout, by name.

    Rollouts ─ ADVANTAGES[name].score ─▶ advantages_B ─ to_tokens ─▶ advantages_T (─ whitened, clipped)

B counts rollouts, never rows. Rewards are finite (`Rollout` sees to that); `groups_B` says who is compared.
Advantages are in units of the reward unless a formula divides by its deviation. Where members are compared,
one that has nobody to be compared with gets 0, and so do all of a group whose rewards are equal: exactly 0,
however large the rewards. Order, and what a group is called, change nothing; only `rae` knows an order.
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
    """(R - mean of the group) / (std over the whole step of that + eps), ddof 1 (arXiv:2508.08221;
    `adv.liteppo_group_mean_batch_std`). The step is all that is scored together, lone rollouts included."""
    centred_B = drgrpo(rewards_B, groups_B)
    if len(centred_B) < 2:
        return centred_B
    return centred_B / (centred_B.std(correction=1) + eps)


def opo(rewards_B: Tensor, groups_B: Tensor, lengths_B: Tensor) -> Tensor:
    """R - sum(len · R) / sum(len) of the group, lengths in trained tokens, above 0: the baseline of least
    variance where long rollouts have large gradients (arXiv:2505.23585; `adv.opo`)."""
    groups = Groups(groups_B)
    baseline_B = groups.sum(lengths_B * rewards_B) / groups.sum(lengths_B)
    return _compared(rewards_B.double() - baseline_B, rewards_B, groups)


def gpg(rewards_B: Tensor, groups_B: Tensor, *, f_norm: float = 1.0) -> Tensor:
    """B / (number of rewards that are not 0) · (R - mean of the group) / f_norm, B of the whole step
    (arXiv:2504.02546; `adv.gpg`)."""
    alpha = len(rewards_B) / max(1, int(torch.count_nonzero(rewards_B)))
    return alpha * drgrpo(rewards_B, groups_B) / f_norm


def maxrl(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """(R - mean) / mean of the group, 0 where the mean is not above 0; for rewards of 0 and more
    (arXiv:2602.02710; `adv.maxrl`)."""
    mean_B = Groups(groups_B).mean(rewards_B)
    return torch.where(mean_B > 0, drgrpo(rewards_B, groups_B) / mean_B, torch.zeros_like(mean_B))


def passk(rewards_B: Tensor, groups_B: Tensor, *, eps: float = EPS) -> Tensor:
    """(best - second best) / (std + eps) for the best of the group, 0 for all others; std with ddof 1
    (arXiv:2503.19595; `adv.passk`). Where several are best, none makes a difference."""
    groups, rewards_B = Groups(groups_B), rewards_B.double()
    best_B = rewards_B == groups.high(rewards_B)
    second_B = groups.high(rewards_B.masked_fill(best_B, -torch.inf))
    alone_B = best_B & (groups.sum(best_B) == 1) & (groups.size_B > 1)
    lead_B = torch.where(alone_B, rewards_B - second_B, torch.zeros_like(rewards_B))
    return lead_B / (groups.std(rewards_B, 1) + eps)


def gdpo(parts_BK: Tensor, groups_B: Tensor, weights_K: Tensor, *, eps: float = EPS) -> Tensor:
    """Sum over the parts of the reward of w · GRPO(part), ddof 1; whitened over the step's tokens afterwards
    (arXiv:2601.05242; `adv.gdpo`)."""
    scores_KB = [grpo(part_B, groups_B, eps=eps) for part_B in parts_BK.unbind(1)]
    return torch.stack(scores_KB, dim=1) @ weights_K.double()


def rae(
    rewards_B: Tensor, agents: Sequence[str], *, baselines: Mapping[str, float], decay: float = DECAY
) -> tuple[Tensor, dict[str, float]]:
    """R - b of the agent, and the baselines after it: b becomes decay · b + (1 - decay) · R, for each rollout
    in turn, after its use (arXiv:2506.24119; `adv.rae`). An agent that nobody heard of starts at 0.

    The one estimator for which a lone rollout is worth something, and the one with a memory: the baselines
    belong into the checkpoint that contains the step.
    """
    left, advantages = dict(baselines), []
    for reward, agent in zip(rewards_B.tolist(), agents, strict=True):
        baseline = left.get(agent, 0.0)
        advantages.append(reward - baseline)
        left[agent] = decay * baseline + (1 - decay) * reward
    return torch.tensor(advantages, dtype=torch.float64), left


def to_tokens(
    advantages_B: Tensor, chosen: object, rollout_R: Tensor, rows_T: Tensor, *, bound: float | None = None
) -> Tensor:
    """The advantage of each trained token of the step: every row of a rollout has the rollout's, whitened
    over the step's tokens where `chosen` says so, and within ± bound."""
    advantages_T = advantages_B[rollout_R][rows_T]
    if isinstance(chosen, settings.Gdpo | settings.ReinforcePpBaseline) and chosen.whiten:
        advantages_T = whitened(advantages_T)
    return advantages_T if bound is None else advantages_T.clamp(-bound, bound)


def _compared(advantages_B: Tensor, rewards_B: Tensor, groups: Groups) -> Tensor:
    """Exactly 0 where a group's rewards are equal, as a lone one is to itself: the rounding of a mean is no
    advantage, and a deviation of 0 would make a large one of it."""
    return torch.where(groups.spread(rewards_B) > 0, advantages_B, torch.zeros_like(advantages_B))


Need = Literal["parts", "baselines"]


@dataclass(frozen=True)
class Estimator:
    """One way to score rollouts."""

    settings: type[Any]
    score: Callable[[Rollouts, Any], Tensor]
    """[B] float64. Raises RefusedRollout for a rollout that the formula cannot take."""
    needs: frozenset[Need] = frozenset()
    compares: bool = True
    """Whether members of a group are compared, so that one without variance teaches nothing."""
    whole_step: bool = False
    """Whether every rollout of the optimizer step must be scored in one call; else group by group will do."""


def baselines_after(rollouts: Rollouts, chosen: settings.Rae) -> dict[str, float]:
    """What `rae` remembers once these rollouts are trained."""
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
                member.rollout_id, f"maxrl takes no reward below 0, and its is {member.reward}"
            )
    return maxrl(rollouts.rewards, rollouts.groups)


def _gdpo(rollouts: Rollouts, chosen: settings.Gdpo) -> Tensor:
    weights_K = torch.tensor(list(chosen.weights.values()), dtype=torch.float64)
    return gdpo(rollouts.parts(list(chosen.weights)), rollouts.groups, weights_K, eps=chosen.eps)


def _drgrpo(rollouts: Rollouts, _: Any) -> Tensor:
    return drgrpo(rollouts.rewards, rollouts.groups)


def _grpo(rollouts: Rollouts, chosen: settings.Grpo) -> Tensor:
    return grpo(rollouts.rewards, rollouts.groups, ddof=chosen.ddof, eps=chosen.eps)


ADVANTAGES: Mapping[str, Estimator] = {
    "drgrpo": Estimator(settings.Plain, _drgrpo),
    "grpo_ddof1": Estimator(settings.Grpo, _grpo),
    "grpo_ddof0": Estimator(settings.Grpo, _grpo),
    "rloo": Estimator(settings.Plain, lambda b, _: rloo(b.rewards, b.groups)),
    "liteppo": Estimator(
        settings.Liteppo, lambda b, s: liteppo(b.rewards, b.groups, eps=s.eps), whole_step=True
    ),
    "opo": Estimator(settings.Plain, _opo),
    "gpg": Estimator(settings.Gpg, lambda b, s: gpg(b.rewards, b.groups, f_norm=s.f_norm), whole_step=True),
    "maxrl": Estimator(settings.Plain, _maxrl),
    "passk": Estimator(settings.Passk, lambda b, s: passk(b.rewards, b.groups, eps=s.eps)),
    "gdpo": Estimator(settings.Gdpo, _gdpo, needs=frozenset({"parts"})),
    "reinforce_pp_baseline": Estimator(settings.ReinforcePpBaseline, _drgrpo),
    "rae": Estimator(
        settings.Rae,
        lambda b, s: _rae(b, s)[0],
        needs=frozenset({"baselines"}),
        compares=False,
        whole_step=True,
    ),
}
"""What gives a rollout one advantage; `returns.RETURNS` are those that give each token its own."""
