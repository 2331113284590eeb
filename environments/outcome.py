"""What became of one episode, for one agent in it."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["completed", "truncated", "failed", "abandoned"]


@dataclass(frozen=True)
class TurnReward:
    """A reward for one answer. `turn_id` is the id of the completion."""

    turn_id: str
    value: float


@dataclass(frozen=True)
class NamedReward:
    """One of the rewards that a library gives an episode, each under a name of its own. `source` is where it
    comes from, as recorded sessions say."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class EpisodeOutcome:
    """`final` is the reward at the end, `turn_rewards` are those before it, `named` are those of a library;
    their sum is the episode's reward. `final` is None if nobody has judged the end: that is not 0."""

    status: Status
    final: float | None = None
    turn_rewards: tuple[TurnReward, ...] = ()
    reason: str | None = None
    turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    named: tuple[NamedReward, ...] = ()

    @property
    def reward(self) -> float | None:
        given = [each.value for each in self.turn_rewards] + [each.value for each in self.named]
        given += [self.final] if self.final is not None else []
        return sum(given) if given else None
