"""The rollouts of a batch, each with the one reward that is compared.

A rollout is one episode. It counts once, however many rows its branches make, and all its rows get its
advantage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


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
