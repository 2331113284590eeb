"""What an environment says after `reset`, and after each answer of the model."""

from typing import Any

import msgspec

Message = dict[str, Any]
"""A message as chat completions take it."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """`messages` go to `player`, whose turn is next. `reward` belongs to the answer before this step; it is
    None if the environment has no opinion, which is not 0."""

    messages: tuple[Message, ...] = ()
    player: int = 0
    reward: float | None = None
    rewards: dict[int, float] = {}
    """What each player of a game gets at its end."""
    terminated: bool = False
    """The episode reached its end."""
    truncated: bool = False
    """The environment cut the episode off, for instance at its own limit of steps."""
    metrics: dict[str, float] = {}

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment is: how many players it has, the tools that it offers, and how many tasks."""

    name: str
    version: str = ""
    players: int = 1
    frozen: tuple[int, ...] = ()
    """The players that never learn."""
    tools: tuple[dict[str, Any], ...] = ()
    task_count: int | None = None
    """None if there is no end of tasks."""
