"""What is compared: the rollouts of a batch, each with the one reward that it earned.

A rollout is an episode, however many rows its forks make of it: it counts once, and all its rows get its
advantage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


class RefusedRollout(ValueError):
    """A rollout that no statistic may contain. Whoever catches this ends it, and scores the others."""

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
    """All of its rewards added up. A number: what still waits for one is no `Rollout`, for null is not 0."""
    output_tokens: int = 0
    """How many tokens of it are trained, in all of its rows together."""
    input_tokens: int = 0
    """How many it read."""
    turns: int = 0
    truncated: bool = False
    agent: str = ""
    """Whose baseline it is compared with, where each agent has one (`rae`)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward by what it is for, where that is compared (`gdpo`)."""

    def __post_init__(self) -> None:
        for name, value in (("reward", self.reward), *self.parts.items()):
            if value is None:
                raise RefusedRollout(self.rollout_id, f"its {name} is null, and null is not 0")
            if not math.isfinite(value):
                raise RefusedRollout(self.rollout_id, f"its {name} is {value}")


@dataclass(frozen=True)
class Rollouts:
    """B rollouts that are scored together, as tensors. `baselines` is what agents earned before (`rae`)."""

    members: tuple[Rollout, ...]
    baselines: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for member in self.members:
            if member.rollout_id in seen:
                raise ValueError(f"rollout {member.rollout_id} is here twice: its rows count once together")
            seen.add(member.rollout_id)

    @cached_property
    def rewards(self) -> Tensor:
        """[B] float64."""
        return torch.tensor([member.reward for member in self.members], dtype=torch.float64)

    @cached_property
    def groups(self) -> Tensor:
        """[B] int64: the groups, numbered from 0 as they first appear."""
        numbers: dict[str, int] = {}
        of = [numbers.setdefault(member.group_id, len(numbers)) for member in self.members]
        return torch.tensor(of, dtype=torch.int64)

    @cached_property
    def output_tokens(self) -> Tensor:
        """[B] float64."""
        return torch.tensor([member.output_tokens for member in self.members], dtype=torch.float64)

    def parts(self, names: Sequence[str]) -> Tensor:
        """[B, K] float64: the named parts of each reward. A missing one is refused: it is null, not 0."""
        for member in self.members:
            for name in names:
                if name not in member.parts:
                    raise RefusedRollout(member.rollout_id, f"it has no reward for {name!r}")
        parts = [[member.parts[name] for name in names] for member in self.members]
        return torch.tensor(parts, dtype=torch.float64).reshape(len(self.members), len(names))


class Groups:
    """Which rollout is in which group. Every statistic comes back per rollout, [B]."""

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
        """Of a group too small for it: 0."""
        squares_B = self.sum((values_B.double() - self.mean(values_B)) ** 2)
        return (squares_B / (self.size_B - ddof).clamp(min=1)).sqrt()

    def high(self, values_B: Tensor) -> Tensor:
        highs_G = torch.full((self._number,), -torch.inf, dtype=torch.float64)
        return highs_G.scatter_reduce(0, self._of_B, values_B.double(), "amax")[self._of_B]

    def spread(self, values_B: Tensor) -> Tensor:
        """The highest minus the lowest."""
        return self.high(values_B) + self.high(-values_B)
