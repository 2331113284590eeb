"""Changes rewards before they are compared: truncation and length penalties.

Rollout, … ─ untruncated ─▶ rollouts to compare ─ shaped ─▶ the same rollouts with their changed rewards

Names such as `adv.overlong_dapo` are cases of `algorithms_golden.json` in the tests.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer_service.algorithms.advantages.rollouts import Groups, Rollout, Rollouts
from trainer_service.algorithms.advantages.settings import OVERLONG_FACTOR, ShapingSettings, Truncated


def untruncated(
    rollouts: Sequence[Rollout], how: Truncated = "mask"
) -> tuple[tuple[Rollout, ...], tuple[Rollout, ...]]:
    """The rollouts that are compared, and those that are neither compared nor trained.

    `mask` excludes truncated rollouts; `zero` sets their reward and its parts to 0; `keep` leaves them as
    they are."""
    if how == "mask":
        compared = tuple(each for each in rollouts if not each.truncated)
        return compared, tuple(each for each in rollouts if each.truncated)
    if how == "zero":
        return tuple(_zeroed(each) if each.truncated else each for each in rollouts), ()
    return tuple(rollouts), ()


def shaped(rollouts: Sequence[Rollout], settings: ShapingSettings) -> tuple[Rollout, ...]:
    """The same rollouts; the length penalties of the settings are subtracted from their rewards."""
    rewards_B = (batch := Rollouts(tuple(rollouts))).rewards
    if (weights := settings.length_penalty) is not None:
        sizes = [[each.output_tokens, each.input_tokens, each.turns] for each in rollouts]
        rewards_B = length_penalty_linear(
            rewards_B,
            batch.groups,
            torch.tensor(sizes, dtype=torch.float64).reshape(-1, 3),
            torch.tensor([weights.output_tokens, weights.input_tokens, weights.turns], dtype=torch.float64),
        )
    if (limit := settings.overlong) is not None:
        rewards_B = rewards_B + overlong_dapo(
            batch.output_tokens, max_len=limit.max_len, cache=limit.cache, factor=limit.factor
        )
    rewards = rewards_B.tolist()
    return tuple(replace(each, reward=reward) for each, reward in zip(rollouts, rewards, strict=True))


def overlong_dapo(lengths_B: Tensor, *, max_len: int, cache: int, factor: float = OVERLONG_FACTOR) -> Tensor:
    """[B] float64 in [-factor, 0]: min(-(len - (max_len - cache)) / cache · factor, 0), to be added to the
    reward of a rollout of `len` trained tokens (DAPO, arXiv:2503.14476; `adv.overlong_dapo`). Rollouts of
    several turns can be longer than `max_len`; they get -factor."""
    beyond_B = lengths_B.double() - (max_len - cache)
    return (-beyond_B / cache * factor).clamp(-factor, 0)


def length_penalty_linear(
    rewards_B: Tensor, groups_B: Tensor, lengths_BQ: Tensor, weights_Q: Tensor
) -> Tensor:
    """[B] float64: R - mean(R) · Σ w · q / max(q). The sum is over Q measures q of a rollout's length.

    Mean and max are those of the group (`adv.length_penalty_linear`).

    The factor mean(R) makes the penalty small for groups that rarely succeed. A negative mean counts as
    0, because it would reward length. A measure that is 0 for the whole group adds no penalty."""
    groups = Groups(groups_B)
    longest_BQ = torch.stack([groups.high(lengths_B) for lengths_B in lengths_BQ.unbind(1)], dim=1)
    shares_BQ = lengths_BQ.double() / longest_BQ.clamp(min=1)
    return rewards_B.double() - groups.mean(rewards_B).clamp(min=0) * (shares_BQ @ weights_Q.double())


def _zeroed(rollout: Rollout) -> Rollout:
    return replace(rollout, reward=0.0, parts=dict.fromkeys(rollout.parts, 0.0))
