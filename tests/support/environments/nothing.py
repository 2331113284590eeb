"""Environments that are never asked anything."""

from collections.abc import Sequence
from typing import Any

from environments.environment import Description, Step, Task


class NoEnvironment:
    tools: Sequence[dict[str, Any]] = ()

    async def reset(self, task: Task) -> Step:
        raise NotImplementedError

    async def step(self, answer: str) -> Step:
        raise NotImplementedError

    async def call(self, name: str, arguments: str) -> Step:
        raise NotImplementedError

    async def close(self) -> None: ...


class NoEnvironments:
    """`count` tasks that have nothing but an id."""

    def __init__(self, count: int = 0) -> None:
        self.description = Description(name="nothing", task_count=count)
        self._count = count

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        return [Task(f"{seed}:{number}", {}) for number in range(start, min(self._count, start + count))]

    def environment(self) -> NoEnvironment:
        return NoEnvironment()

    async def __aenter__(self) -> "NoEnvironments":
        return self

    async def __aexit__(self, *error: object) -> None: ...
