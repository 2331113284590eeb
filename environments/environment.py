"""What an environment is: a source gives tasks, an environment plays one episode in steps, and an outcome
says for each agent how the episode ended.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from environments.errors import NoAction

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


class Task(msgspec.Struct, frozen=True):
    """`data` goes to the environment's `reset` unchanged; `id` is the `task_id` of the sessions."""

    id: str
    data: dict[str, Any]


Message = dict[str, Any]
"""A message as chat completions take it."""


def tool_message(text: str) -> Message:
    """What the model reads as the result of its call."""
    return {"role": "tool", "content": text}


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["function"]["name"] for each in tools]


def tool_arguments(tools: Sequence[Mapping[str, Any]], name: str, arguments: str) -> dict[str, Any]:
    """The arguments of a call of one of the tools. Raises NoAction for what the model did wrong."""
    known = tool_names(tools)
    if name not in known:
        raise NoAction(f"there is no tool {name!r}, only {', '.join(known)}")
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise NoAction(f"the arguments are no JSON: {error}") from None
    if not isinstance(given, dict):
        raise NoAction("the arguments are no JSON object")
    return given


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
    """None if the tasks have no end."""


class Environment(Protocol):
    """The environment of one episode. Every method raises EnvironmentFault."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The tools that the model may call, as chat completions describe them."""

    async def reset(self, task: Task) -> Step: ...

    async def step(self, answer: str) -> Step:
        """What follows the model's answer in plain text."""

    async def call(self, name: str, arguments: str) -> Step:
        """The result of a tool, in messages of the role `tool`. A call can earn a reward and end the episode.
        `arguments` is JSON as the model wrote it; what is wrong with it becomes a text for the model."""

    async def close(self) -> None: ...


class TaskSource(Protocol):
    """Where tasks come from."""

    @property
    def description(self) -> Description: ...

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        """Tasks `start` to `start + count`, fewer at the end. The same seed gives the same tasks."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(self, *error: object) -> None: ...


class EnvironmentSource(TaskSource, Protocol):
    """Tasks, and the environments in which an agent loop plays them."""

    def environment(self) -> Environment: ...
