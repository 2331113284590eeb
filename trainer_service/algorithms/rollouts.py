"""The rollouts of a batch, each with the one reward that is compared; how rewards are shaped before, and
which groups have no learning signal.

    Rollout, … ─ untruncated ─▶ rollouts to compare ─ shaped ─▶ the same rollouts with their changed rewards
    Rollouts ─ groups_without_signal ─▶ groups that are not trained, and why

A rollout is one episode. It counts once, however many rows its branches make, and all its rows get its
advantage. The rewards of groups without a signal are still logged. Otherwise the logged mean would leave out
tasks that the policy always solves.

Names such as `adv.overlong_dapo` are cases of `algorithms_golden.json` in the tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainer_service.algorithms.setting_choices import Frozen

ZERO_VARIANCE = 1e-6
"""A group whose rewards differ by at most this has no learning signal."""

Truncated = Literal["mask", "zero", "keep"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class RefusedRollout(ValueError):
    """A rollout that must not enter any statistic. The caller ends it, and scores the others without it."""

    def __init__(self, rollout_id: str, reason: str) -> None:
        super().__init__(f"rollout {rollout_id}: {reason}")
        self.rollout_id = rollout_id
        self.reason = reason


@dataclass(frozen=True)
class Rollout:
    """One episode that ended and was rewarded."""

    rollout_id: str
    group_id: str
    reward: float
    """The sum of all its rewards; finite. An episode that still waits for a reward has no `Rollout`."""
    output_tokens: int = 0
    """Trained tokens in all of its rows."""
    input_tokens: int = 0
    """Tokens of prompts and tool results."""
    turns: int = 0
    truncated: bool = False
    agent: str = ""
    """The agent whose baseline it is compared with (`rae`)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward by name (`gdpo`)."""

    def __post_init__(self) -> None:
        for name, value in (("reward", self.reward), *self.parts.items()):
            if value is None:
                raise RefusedRollout(self.rollout_id, f"its {name} is null, and null is not 0")
            if not math.isfinite(value):
                raise RefusedRollout(self.rollout_id, f"its {name} is {value}")


@dataclass(frozen=True)
class Rollouts:
    """B rollouts that are scored together. `baselines` are the moving averages of the agents' rewards
    (`rae`).

    Raises ValueError if a rollout is given twice.
    """

    members: tuple[Rollout, ...]
    baselines: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for member in self.members:
            if member.rollout_id in seen:
                raise ValueError(f"rollout {member.rollout_id} is given twice; all its rows count as one")
            seen.add(member.rollout_id)

    @cached_property
    def rewards(self) -> Tensor:
        """[B] float64."""
        return torch.tensor([member.reward for member in self.members], dtype=torch.float64)

    @cached_property
    def groups(self) -> Tensor:
        """[B] int64: the group of each rollout, numbered from 0 in order of appearance."""
        numbers: dict[str, int] = {}
        of = [numbers.setdefault(member.group_id, len(numbers)) for member in self.members]
        return torch.tensor(of, dtype=torch.int64)

    @cached_property
    def output_tokens(self) -> Tensor:
        """[B] float64."""
        return torch.tensor([member.output_tokens for member in self.members], dtype=torch.float64)

    def parts(self, names: Sequence[str]) -> Tensor:
        """[B, K] float64: the named parts of each reward. Raises RefusedRollout for a missing part."""
        for member in self.members:
            for name in names:
                if name not in member.parts:
                    raise RefusedRollout(member.rollout_id, f"it has no reward for {name!r}")
        parts = [[member.parts[name] for name in names] for member in self.members]
        return torch.tensor(parts, dtype=torch.float64).reshape(len(self.members), len(names))


class Groups:
    """Statistics of groups. `groups_B` gives the group of each rollout; every result is [B], the value of the
    rollout's group."""

    def __init__(self, groups_B: Tensor) -> None:
        names_G, self._of_B = torch.unique(groups_B, return_inverse=True)
        self._number = len(names_G)
        self.size_B = self.sum(torch.ones(len(groups_B), dtype=torch.float64))

    def sum(self, values_B: Tensor) -> Tensor:
        sums_G = torch.zeros(self._number, dtype=torch.float64).index_add_(0, self._of_B, values_B.double())
        return sums_G[self._of_B]

    def mean(self, values_B: Tensor) -> Tensor:
        return self.sum(values_B) / self.size_B

    def std(self, values_B: Tensor, ddof: int) -> Tensor:
        """The standard deviation; 0 for groups of `ddof` rollouts or fewer."""
        squares_B = self.sum((values_B.double() - self.mean(values_B)) ** 2)
        return (squares_B / (self.size_B - ddof).clamp(min=1)).sqrt()

    def high(self, values_B: Tensor) -> Tensor:
        highs_G = torch.full((self._number,), -torch.inf, dtype=torch.float64)
        return highs_G.scatter_reduce(0, self._of_B, values_B.double(), "amax")[self._of_B]

    def spread(self, values_B: Tensor) -> Tensor:
        """The largest minus the smallest value."""
        return self.high(values_B) + self.high(-values_B)


class Overlong(Frozen):
    max_len: int = Field(gt=0)
    """The length, in trained tokens, at which the penalty is full."""
    cache: int = Field(gt=0)
    """The penalty begins this many tokens before `max_len`."""
    factor: float = Field(1.0, gt=0)
    """The full penalty, in units of the reward."""

    @model_validator(mode="after")
    def _cache_fits(self) -> "Overlong":
        if self.cache > self.max_len:
            raise ValueError(f"overlong: a cache of {self.cache} does not fit into max_len, {self.max_len}")
        return self


class LengthPenalty(Frozen):
    """The share of its group's mean reward that the longest member loses, for each measure of length."""

    output_tokens: Fraction = 0.0
    """The share that the member with the most sampled tokens loses."""
    input_tokens: Fraction = 0.0
    """The share that the member with the most tokens that it read loses."""
    turns: Fraction = 0.0
    """The share that the member with the most turns loses."""

    @model_validator(mode="after")
    def _something_counts(self) -> "LengthPenalty":
        if not (self.output_tokens or self.input_tokens or self.turns):
            raise ValueError("length_penalty: no length has a weight; leave it out to have no penalty")
        return self


class ShapingSettings(Frozen):
    truncated: Truncated = "mask"
    """mask: truncated rollouts are neither compared nor trained; zero: their reward becomes 0; keep: their
    reward does not change."""
    overlong: Overlong | None = None
    length_penalty: LengthPenalty | None = None
    turn_discount: Fraction | None = None
    """A turn's return is its own reward plus this factor times the return of the next turn."""
    kl_in_reward: float = Field(0.0, ge=0)
    """Each token's reward is reduced by this factor times lp - lp_ref, in nats. lp is the token's
    log-probability before the step, and lp_ref its log-probability under the reference policy."""


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
    if settings.length_penalty is None and settings.overlong is None:
        return tuple(rollouts)
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


def overlong_dapo(lengths_B: Tensor, *, max_len: int, cache: int, factor: float) -> Tensor:
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


@dataclass(frozen=True)
class NoSignal:
    """Why a group has no learning signal: its name in the metrics, and the text of its members' verdict."""

    kind: Literal["singleton", "zero_var"]
    detail: str


def groups_without_signal(
    rollouts: Rollouts, *, tolerance: float = ZERO_VARIANCE, parts: Sequence[str] = ()
) -> Mapping[str, NoSignal]:
    """The groups, by id, that have a single rollout, or whose largest and smallest reward differ by at most
    `tolerance` (`filter.zero_variance_groups`). Only estimators that compare the members of a group need this
    filter.

    If `parts` of the reward are named, each part is compared by itself, in place of the whole reward. A group
    then has no signal if no part differs by more than `tolerance`.
    """
    if not rollouts.members:
        return {}
    groups = Groups(rollouts.groups)
    compared_BK = rollouts.parts(parts) if parts else rollouts.rewards[:, None]
    span_B = torch.stack([groups.spread(part_B) for part_B in compared_BK.unbind(1)]).amax(0)
    found: dict[str, NoSignal] = {}
    for member, size, span in zip(rollouts.members, groups.size_B.tolist(), span_B.tolist(), strict=True):
        if size < 2:
            found[member.group_id] = NoSignal("singleton", "singleton group")
        elif span <= tolerance and member.group_id not in found:
            detail = f"all {size:.0f} rewards of the group are {member.reward:g}"
            found[member.group_id] = NoSignal("zero_var", detail)
    return found
