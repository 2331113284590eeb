"""The estimators: each is a class with its settings and its formula, from rewards to advantages.

    Rollouts ─ Grpo(eps=…).score ─▶ advantages_B ─ to_tokens ─▶ advantages_T (─ whitened, clipped)
    TokenRewards ─ Gae(lam=…).estimate ─▶ Returns: one advantage for each token (`returns.py`)

B counts rollouts, never rows. Rewards are finite: `Rollout` refuses others. `groups` [B] int64 names the
group of each rollout. Advantages are float64, in units of the reward unless a formula divides by a standard
deviation. A formula that compares group members gives exactly 0 to a rollout that is alone in its group, and
to all rollouts of a group with equal rewards. The result does not depend on the numbers that name the groups.
Only `rae` depends on the order of the rollouts.

Names in backticks with a dot, such as `adv.rloo`, are cases of `algorithms_golden.json` in the tests.
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from trainer_service.algorithms.returns import Gae, ReinforcePp, TokenAdvantage, whitened
from trainer_service.algorithms.rollouts import Groups, RefusedRollout, Rollouts, ShapingSettings
from trainer_service.algorithms.setting_choices import Above0, Frozen, by_name

EPS = 1e-6
"""Added to a standard deviation before a division by it."""
BATCH_EPS = 1e-5
"""Added to the standard deviation of the whole step before a division by it."""
DECAY = 0.95


def centred(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """R - mean of the group."""
    groups = Groups(groups_B)
    return _compared(rewards_B.double() - groups.mean(rewards_B), rewards_B, groups)


def standardised(rewards_B: Tensor, groups_B: Tensor, *, ddof: int, eps: float) -> Tensor:
    """(R - mean) / (std + eps) of the group."""
    return centred(rewards_B, groups_B) / (Groups(groups_B).std(rewards_B, ddof) + eps)


def _compared(advantages_B: Tensor, rewards_B: Tensor, groups: Groups) -> Tensor:
    """The advantages, but exactly 0 where all rewards of a group are equal. There, R - mean is only a
    rounding error, which a division by the deviation of about 0 would make large."""
    return torch.where(groups.spread(rewards_B) > 0, advantages_B, torch.zeros_like(advantages_B))


class RolloutAdvantage(Frozen):
    """The estimators with one advantage per rollout."""

    compares: ClassVar[bool] = True
    """Whether the members of a group are compared, so that a group with equal rewards has no advantages."""
    needs_values: ClassVar[bool] = False
    whole_step: ClassVar[bool] = False
    """Whether all rollouts of the optimizer step must be scored in one call. If not, each group can be scored
    in a call of its own."""

    @property
    def whitens(self) -> bool:
        """Whether the advantages are whitened over the step's tokens."""
        return False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the reward that are compared, in place of the whole."""
        return ()

    def score(self, rollouts: Rollouts) -> Tensor:
        """[B] float64. Raises RefusedRollout for a rollout that the formula does not allow."""
        raise NotImplementedError

    def to_tokens(
        self, advantages_B: Tensor, rollout_R: Tensor, rows_T: Tensor, *, bound: float | None = None
    ) -> Tensor:
        """[T] float64: gives each trained token of the step the advantage of its rollout.

        `rollout_R` gives the rollout of each row, and `rows_T` the row of each token. Whitened advantages are
        clipped to ± bound afterwards."""
        advantages_T = advantages_B[rollout_R][rows_T]
        if self.whitens:
            advantages_T = whitened(advantages_T)
        return advantages_T if bound is None else advantages_T.clamp(-bound, bound)


class Drgrpo(RolloutAdvantage):
    name: Literal["drgrpo"] = "drgrpo"

    def score(self, rollouts: Rollouts) -> Tensor:
        """R - mean of the group (Dr. GRPO, arXiv:2503.20783; `adv.drgrpo`)."""
        return centred(rollouts.rewards, rollouts.groups)


class Grpo(RolloutAdvantage):
    name: Literal["grpo_ddof1", "grpo_ddof0"] = "grpo_ddof1"
    eps: Above0 = EPS

    def score(self, rollouts: Rollouts) -> Tensor:
        """(R - mean) / (std + eps) of the group (GRPO, arXiv:2402.03300; `adv.grpo_ddof1`,
        `adv.grpo_ddof0`)."""
        ddof = int(self.name == "grpo_ddof1")
        return standardised(rollouts.rewards, rollouts.groups, ddof=ddof, eps=self.eps)


class Rloo(RolloutAdvantage):
    name: Literal["rloo"] = "rloo"

    def score(self, rollouts: Rollouts) -> Tensor:
        """R - mean of the others = n / (n - 1) · (R - mean) (arXiv:2402.14740; `adv.rloo`)."""
        size_B = Groups(rollouts.groups).size_B
        return centred(rollouts.rewards, rollouts.groups) * size_B / (size_B - 1).clamp(min=1)


class Liteppo(RolloutAdvantage):
    whole_step: ClassVar[bool] = True

    name: Literal["liteppo"] = "liteppo"
    eps: Above0 = BATCH_EPS

    def score(self, rollouts: Rollouts) -> Tensor:
        """(R - mean of the group) / (standard deviation of these differences over the whole step + eps), ddof
        1 (LitePPO, arXiv:2508.08221; `adv.liteppo_group_mean_batch_std`). The step is all rollouts that are
        scored together, also those that are alone in their group."""
        centred_B = centred(rollouts.rewards, rollouts.groups)
        if len(centred_B) < 2:
            return centred_B
        return centred_B / (centred_B.std(correction=1) + self.eps)


class Opo(RolloutAdvantage):
    name: Literal["opo"] = "opo"

    def score(self, rollouts: Rollouts) -> Tensor:
        """R - sum(len · R) / sum(len) of the group, where len are the trained tokens of each rollout, at
        least 1. This baseline has the least variance if gradients grow with length (OPO, arXiv:2505.23585;
        `adv.opo`)."""
        for member in rollouts.members:
            if member.output_tokens < 1:
                raise RefusedRollout(
                    member.rollout_id, "opo weighs it by its trained tokens, and it has none"
                )
        rewards_B, lengths_B, groups = rollouts.rewards, rollouts.output_tokens, Groups(rollouts.groups)
        baseline_B = groups.sum(lengths_B * rewards_B) / groups.sum(lengths_B)
        return _compared(rewards_B.double() - baseline_B, rewards_B, groups)


class Gpg(RolloutAdvantage):
    whole_step: ClassVar[bool] = True

    name: Literal["gpg"] = "gpg"
    f_norm: float = Field(1.0, gt=0)

    def score(self, rollouts: Rollouts) -> Tensor:
        """B / (number of rewards other than 0) · (R - mean of the group) / f_norm, with B of the whole step
        (GPG, arXiv:2504.02546; `adv.gpg`)."""
        rewards_B = rollouts.rewards
        alpha = len(rewards_B) / max(1, int(torch.count_nonzero(rewards_B)))
        return alpha * centred(rewards_B, rollouts.groups) / self.f_norm


class Maxrl(RolloutAdvantage):
    name: Literal["maxrl"] = "maxrl"

    def score(self, rollouts: Rollouts) -> Tensor:
        """(R - mean) / mean of the group, and 0 if the mean is 0. Rewards must be at least 0 (MaxRL,
        arXiv:2602.02710; `adv.maxrl`)."""
        for member in rollouts.members:
            if member.reward < 0:
                raise RefusedRollout(
                    member.rollout_id, f"maxrl takes no reward below 0, but it got {member.reward}"
                )
        mean_B = Groups(rollouts.groups).mean(rollouts.rewards)
        advantages_B = centred(rollouts.rewards, rollouts.groups) / mean_B
        return torch.where(mean_B > 0, advantages_B, torch.zeros_like(mean_B))


class Passk(RolloutAdvantage):
    name: Literal["passk"] = "passk"
    eps: Above0 = EPS

    def score(self, rollouts: Rollouts) -> Tensor:
        """(best - second best) / (std + eps) for the best of the group, 0 for all others; std with ddof 1
        (pass@k, arXiv:2503.19595; `adv.passk`). If several share the best reward, all get 0."""
        groups, rewards_B = Groups(rollouts.groups), rollouts.rewards.double()
        best_B = rewards_B == groups.high(rewards_B)
        second_B = groups.high(rewards_B.masked_fill(best_B, -torch.inf))
        alone_B = best_B & (groups.sum(best_B) == 1) & (groups.size_B > 1)
        lead_B = torch.where(alone_B, rewards_B - second_B, torch.zeros_like(rewards_B))
        return lead_B / (groups.std(rewards_B, 1) + self.eps)


class Gdpo(RolloutAdvantage):
    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, float]
    """The weight of each part of the reward, by name."""
    eps: Above0 = EPS
    whiten: bool = True

    @model_validator(mode="after")
    def _something_counts(self) -> "Gdpo":
        if not any(self.weights.values()):
            raise ValueError("gdpo: no part of the reward has a weight, so nothing would be learned")
        return self

    @property
    def whitens(self) -> bool:
        return self.whiten

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def score(self, rollouts: Rollouts) -> Tensor:
        """The sum of w · GRPO(part) over the parts of the reward, ddof 1 (GDPO, arXiv:2601.05242;
        `adv.gdpo`). Afterwards it is whitened over the step's tokens, if the settings ask for it."""
        weights_K = torch.tensor(list(self.weights.values()), dtype=torch.float64)
        scores_KB = [
            standardised(part_B, rollouts.groups, ddof=1, eps=self.eps)
            for part_B in rollouts.parts(self.parts).unbind(1)
        ]
        return torch.stack(scores_KB, dim=1) @ weights_K


class Rae(RolloutAdvantage):
    compares: ClassVar[bool] = False
    whole_step: ClassVar[bool] = True

    name: Literal["rae"] = "rae"
    decay: float = Field(DECAY, ge=0, lt=1)
    """The weight of an agent's old baseline in the new one; the new reward has the weight 1 - decay."""

    def score(self, rollouts: Rollouts) -> Tensor:
        """R - b, where b is the baseline of the rollout's agent (role-conditioned advantage estimation,
        SPIRAL, arXiv:2506.24119; `adv.rae`).

        Rollouts are scored in order. After each rollout, the baseline of its agent becomes
        decay · b + (1 - decay) · R. The baseline of an unknown agent is 0. This estimator needs no group. It
        is the only one with a state: the checkpoint that contains the step must contain the baselines."""
        return self._scored(rollouts)[0]

    def baselines_after(self, rollouts: Rollouts) -> dict[str, float]:
        """The baselines after these rollouts are trained."""
        return self._scored(rollouts)[1]

    def _scored(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, float]]:
        updated, advantages = dict(rollouts.baselines), []
        for member, reward in zip(rollouts.members, rollouts.rewards.tolist(), strict=True):
            baseline = updated.get(member.agent, 0.0)
            advantages.append(reward - baseline)
            updated[member.agent] = self.decay * baseline + (1 - self.decay) * reward
        return torch.tensor(advantages, dtype=torch.float64), updated


class ReinforcePpBaseline(RolloutAdvantage):
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True

    @property
    def whitens(self) -> bool:
        return self.whiten

    def score(self, rollouts: Rollouts) -> Tensor:
        return centred(rollouts.rewards, rollouts.groups)  # whitened: `adv.reinforce_pp_baseline`


Advantage = Annotated[
    Drgrpo
    | Grpo
    | Rloo
    | Liteppo
    | Opo
    | Gpg
    | Maxrl
    | Passk
    | Gdpo
    | Rae
    | ReinforcePpBaseline
    | ReinforcePp
    | Gae,
    Field(discriminator="name"),
    BeforeValidator(by_name),
]
"""One estimator, by its `name`; a name alone stands for the estimator with its defaults."""


def contradiction(advantage: Advantage, shaping: ShapingSettings) -> str | None:
    """The reason why the two settings exclude each other; None if they do not."""
    name = advantage.name
    if not isinstance(advantage, TokenAdvantage) and shaping.kl_in_reward:
        return f"kl_in_reward rewards tokens, and {name} compares whole rollouts"
    if not isinstance(advantage, TokenAdvantage) and shaping.turn_discount is not None:
        return f"turn_discount rewards turns, and {name} compares whole rollouts"
    if name == "gdpo" and (shaping.overlong or shaping.length_penalty):
        return "gdpo compares the parts of a reward, and a length penalty changes only their sum"
    return None
