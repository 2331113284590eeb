"""The protocols of environments: a source gives tasks, and an environment plays one episode."""

from collections.abc import Sequence
from typing import Any, Protocol

from environments.step import Description, Step
from environments.task import Task


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
