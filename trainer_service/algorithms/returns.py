"""The estimators with one advantage per token, from the rewards of this and later tokens of its row; and
the loss of the critic, which learns to predict the returns.

    reward ─ at_ends ─▶ rewards_T ─ kl_in_reward? ─▶ ReinforcePp | Gae ─ estimate ─▶ Returns ─ whitened? ─▶ …

T counts the trained tokens of the whole step, row after row, in the order in which they were sampled. Tokens
of tools and users are left out, so discounts do not count them. All arithmetic is float64. Sums stay inside a
row, so the result does not depend on how rows are packed.

Names such as `reward.kl_in_reward_k1` and `critic.value_clip` are cases of
`algorithms_golden.json` in the tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer_service.algorithms.setting_choices import Frozen
from trainer_service.algorithms.tokens import widened

WHITEN_EPS = 1e-8
"""Added to a variance before its square root is taken."""

Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Returns:
    """The advantage of each token for the actor, and its target for the critic."""

    advantages_T: Tensor
    returns_T: Tensor
    """The values that a critic learns to predict, in units of the reward; never whitened."""


@dataclass(frozen=True)
class TokenRewards:
    """The rewards of the step's trained tokens, and the row, turn and value of each."""

    rewards_T: Tensor
    rows_T: Tensor
    """The row of each token; the tokens of a row are contiguous."""
    values_T: Tensor | None = None
    """The critic's values: the expected sum of the rewards of this and all later tokens of the row."""
    turns_T: Tensor | None = None
    """The turn of each token, numbered over the whole step; the tokens of a turn are contiguous."""

    def __post_init__(self) -> None:
        for name in ("rows", "turns"):
            owners_T = getattr(self, f"{name}_T")
            if owners_T is None:
                continue
            runs = torch.unique_consecutive(owners_T)
            if len(runs) != len(torch.unique(owners_T)):
                raise ValueError(f"the tokens of some {name} are not contiguous")


def at_ends(rewards_K: Tensor, owners_T: Tensor) -> Tensor:
    """[T] float64: the reward of each row (or turn) on its last token, 0 elsewhere. `owners_T` gives the row
    (or turn) of each token."""
    rewards_T = rewards_K.double()[owners_T]
    return torch.where(_last(owners_T), rewards_T, torch.zeros_like(rewards_T))


def kl_in_reward(rewards_T: Tensor, lp_old_T: Tensor, lp_ref_T: Tensor, *, beta: float) -> Tensor:
    """r - beta · (lp_old - lp_ref), log-probabilities in nats: a penalty on leaving the reference policy
    (Ouyang et al. 2022; `reward.kl_in_reward_k1`). A difference that is not finite counts as 0; otherwise the
    returns of all earlier tokens would not be finite."""
    difference_T = lp_old_T.double() - lp_ref_T.double()
    return rewards_T.double() - beta * difference_T.where(
        difference_T.isfinite(), torch.zeros_like(difference_T)
    )


def turn_discount(rewards: Sequence[float | None], *, discount: float) -> list[float]:
    """G_k = R_k + discount · G_(k+1) for each turn k of a session, in the order of the turns (AReaL;
    `adv.turn_discount`).

    A turn without a reward counts as 0. Raises ValueError for a session without any reward.
    """
    if all(reward is None for reward in rewards):
        raise ValueError("no turn has a reward, and null is not 0")
    returns, after = [], 0.0
    for reward in reversed(rewards):
        after = (reward or 0.0) + discount * after
        returns.append(after)
    return returns[::-1]


def whitened(values_T: Tensor, *, eps: float = WHITEN_EPS) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the step's tokens, ddof 1; exactly 0 if all x are equal."""
    values_T = values_T.double()
    if len(values_T) == 0 or bool((values_T == values_T[0]).all()):
        return torch.zeros_like(values_T)
    return (values_T - values_T.mean()) / (values_T.var(correction=1) + eps).sqrt()


def _to_go(values_T: Tensor, decay: float, owners_T: Tensor) -> Tensor:
    """y_t = x_t + decay · y_(t+1) inside each row, in log2(T) passes. Each pass sums twice as many tokens."""
    total_T = values_T.clone()
    reach_T = torch.full_like(total_T, decay).masked_fill(_last(owners_T), 0.0)
    ahead = 1
    while ahead < len(total_T) and bool(reach_T.any()):
        total_T[:-ahead] = total_T[:-ahead] + reach_T[:-ahead] * total_T[ahead:]
        reach_T[:-ahead] = reach_T[:-ahead] * reach_T[ahead:]
        ahead *= 2
    return total_T


def _last(owners_T: Tensor) -> Tensor:
    """[T] bool: whether a token is the last of its row (or turn)."""
    last_T = torch.ones_like(owners_T, dtype=torch.bool)
    last_T[:-1] = owners_T[:-1] != owners_T[1:]
    return last_T


class TokenAdvantage(Frozen):
    """The estimators with one advantage per token, which depends on the whole step."""

    compares: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    """Whether the values of a critic are needed."""

    def estimate(self, tokens: TokenRewards) -> Returns:
        raise NotImplementedError


class ReinforcePp(TokenAdvantage):
    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Fraction = 1.0
    """Discount per trained token; tokens of tools and users do not count."""

    def estimate(self, tokens: TokenRewards) -> Returns:
        """The discounted reward-to-go of each token, whitened over the step's tokens (REINFORCE++,
        arXiv:2501.03262; `adv.reinforce_pp_g1`, `adv.reinforce_pp_g0.9`)."""
        returns_T = _to_go(tokens.rewards_T.double(), self.gamma, tokens.rows_T)
        return Returns(whitened(returns_T), returns_T)


class Gae(TokenAdvantage):
    """`gae` discounts from token to token, `turn_gae` from turn to turn."""

    needs_values: ClassVar[bool] = True

    name: Literal["gae", "turn_gae"] = "gae"
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    whiten: bool = True
    """Whitens the actor's advantages; the critic's returns are never whitened."""

    def estimate(self, tokens: TokenRewards) -> Returns:
        """A_t = d_t + gamma · lam · A_(t+1) with d_t = r_t + gamma · V_(t+1) - V_t; A and V are 0 after the
        last token of a row. Returns are A + V (GAE, arXiv:1506.02438; `adv.gae_g1.0_l1.0`,
        `adv.gae_g0.99_l0.95`)."""
        values_T = _given(tokens.values_T, "values of a critic", self.name).double()
        rewards_T, rows_T = tokens.rewards_T.double(), tokens.rows_T
        if self.name == "turn_gae":
            turns_T = _given(tokens.turns_T, "turns", self.name)
            found = self._of_turns(rewards_T, values_T, rows_T, turns_T)
        else:
            found = self._discounted(rewards_T, values_T, rows_T)
        return Returns(whitened(found.advantages_T) if self.whiten else found.advantages_T, found.returns_T)

    def _of_turns(self, rewards_T: Tensor, values_T: Tensor, rows_T: Tensor, turns_T: Tensor) -> Returns:
        """GAE over turns: the value of a turn is that of its first token, its reward is the sum of its
        tokens' rewards, and all of its tokens get its advantage and return (AReaL; `adv.turn_gae`)."""
        _, turn_T, tokens_K = torch.unique_consecutive(turns_T, return_inverse=True, return_counts=True)
        first_K = tokens_K.cumsum(0) - tokens_K
        rewards_K = torch.zeros_like(tokens_K, dtype=torch.float64).index_add_(0, turn_T, rewards_T)
        found = self._discounted(rewards_K, values_T[first_K], rows_T[first_K])
        return Returns(found.advantages_T[turn_T], found.returns_T[turn_T])

    def _discounted(self, rewards_T: Tensor, values_T: Tensor, rows_T: Tensor) -> Returns:
        next_T = torch.where(_last(rows_T), torch.zeros_like(values_T), values_T.roll(-1))
        differences_T = rewards_T + self.gamma * next_T - values_T
        advantages_T = _to_go(differences_T, self.gamma * self.lam, rows_T)
        return Returns(advantages_T, advantages_T + values_T)


def _given(needed: Tensor | None, what: str, name: str) -> Tensor:
    if needed is None:
        raise ValueError(f"{name} needs the {what}")
    return needed


VALUE_CLIP = 0.2


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss of a micro-batch, and the loss of each of its T tokens."""

    loss: Tensor
    """The scalar to differentiate: this micro-batch's share of the step's loss."""
    per_token_T: Tensor
    clipped_T: Tensor
    """bool: True where the clipped term is the larger one. Such a token has no gradient."""


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    *,
    tokens_in_step: int,
    clip: float | None = VALUE_CLIP,
) -> ValueLoss:
    """The sum of ½ · max((V - R)², (V_clipped - R)²) over the micro-batch's tokens, divided by the number of
    tokens in the whole step. V_clipped is V, clipped to V_old ± clip (PPO2 in OpenAI baselines, verl;
    `critic.value_clip`).

    The unit is the squared reward. `old_values_T` are the critic's values before the step, and `returns_T`
    are `Returns.returns_T`; neither gets a gradient. Without a clip, V_clipped is V."""
    values_T, old_values_T, returns_T = (widened(each) for each in (values_T, old_values_T, returns_T))
    old_values_T, returns_T = old_values_T.detach(), returns_T.detach()
    plain_T = (values_T - returns_T) ** 2
    if clip is None:
        bounded_T = plain_T
    else:
        bounded_T = (values_T.clamp(old_values_T - clip, old_values_T + clip) - returns_T) ** 2
    per_token_T = 0.5 * torch.maximum(plain_T, bounded_T)
    return ValueLoss(
        loss=per_token_T.sum() / tokens_in_step,
        per_token_T=per_token_T.detach(),
        clipped_T=(bounded_T > plain_T).detach(),
    )
