"""Pools of hosts: each new episode goes to the host that runs the fewest.

HostPool ──┬─ HostedEnvironments   environments that an agent loop plays, each in a process of its own
           └─ HostedLibrary        a library that plays whole episodes itself
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from environments.environment import Environment
from environments.errors import EnvironmentFault, HostDied, UnknownEnvironment
from environments.hosts.process import HostProcess
from environments.step import Description, Step
from environments.task import Task, task_id
from rollout_queue import clock

STARTS_WITHIN_S = 120.0
CLOSES_WITHIN_S = 10.0
"""How long the process of an episode may take to end, whose step may still be under way."""
ENDS_WITHIN_S = 20.0
"""How long a host may take to end what it has started."""
SPARE_S = 10.0
TASK_ATTEMPTS = 3


class HostPool:
    """`count` host processes, and the tasks that they know. `step_s` is how long one request may take, in
    seconds. `options` are what the environment is made with."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        count: int,
        step_s: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        first = dict(options or {})
        self._hosts = [
            HostProcess(command, directory, STARTS_WITHIN_S, ENDS_WITHIN_S, first) for _ in range(count)
        ]
        self._running = dict.fromkeys(range(count), 0)
        self._numbers = itertools.count()
        self._step_s = step_s
        self._description: Description | None = None

    @property
    def description(self) -> Description:
        if self._description is None:
            raise RuntimeError("the hosts have not been started")
        return self._description

    async def __aenter__(self) -> Self:
        """Start the hosts. Raises UnknownEnvironment with what the first one printed."""
        try:
            await asyncio.gather(*(host.start() for host in self._hosts))
            described = await asyncio.gather(*(host.describe() for host in self._hosts))
        except EnvironmentFault as error:
            await self.__aexit__()
            raise UnknownEnvironment(str(error)) from None
        self._description = msgspec.convert(described[0], Description, strict=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        """A host that dies meanwhile, because of an episode for instance, is replaced. Raises
        EnvironmentFault."""
        host = self.ready(0)
        for left in reversed(range(TASK_ATTEMPTS)):
            try:
                await host.start()
                given = await host.ask_process(
                    "tasks", None, STARTS_WITHIN_S, seed=seed, start=start, count=count
                )
                break
            except HostDied:
                if not left:
                    raise
        return [Task(task_id(self.description.name, each["id"]), each["data"]) for each in given]

    def take(self) -> tuple[int, str]:
        """The number of the host for a new episode, and the episode's name there."""
        number = min(self._running, key=lambda each: self._running[each])
        self._running[number] += 1
        return number, str(next(self._numbers))

    def ready(self, number: int) -> HostProcess:
        return self._hosts[number]

    def left(self, number: int) -> None:
        self._running[number] -= 1


class HostedEnvironments(HostPool):
    """Environments that an agent loop plays."""

    def environment(self) -> Environment:
        return HostedEnvironment(self, *self.take(), self._step_s)


class HostedEnvironment:
    """One episode's environment, in a process of its own in a host."""

    def __init__(self, pool: HostPool, number: int, episode: str, step_s: float) -> None:
        self._pool, self._number, self._episode, self._step_s = pool, number, episode, step_s
        self._host = pool.ready(number)
        self._generation: int | None = None

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._pool.description.tools

    async def reset(self, task: Task) -> Step:
        await self._host.start()
        self._generation = self._host.generation
        return await self._step("reset", STARTS_WITHIN_S, data=task.data)

    async def step(self, answer: str) -> Step:
        return await self._step("step", answer=answer)

    async def call(self, name: str, arguments: str) -> Step:
        return await self._step("call", name=name, arguments=arguments)

    async def close(self) -> None:
        """Returns once the episode's process has ended, so that no more of them run than episodes."""
        self._pool.left(self._number)
        if self._generation == self._host.generation:
            with suppress(EnvironmentFault):  # the host ends what does not end itself
                grace_s = CLOSES_WITHIN_S
                await self._host.ask("close", self._episode, grace_s + SPARE_S, grace_s=grace_s)

    async def _step(self, do: str, within_s: float | None = None, **given: Any) -> Step:
        said = await self._ask(do, within_s, **given)
        try:
            return msgspec.convert(said, Step, strict=False)
        except msgspec.ValidationError as error:
            raise EnvironmentFault(f"the environment's answer to {do!r} is malformed: {error}") from None

    async def _ask(self, do: str, within_s: float | None = None, **given: Any) -> Any:
        if self._generation != self._host.generation:
            raise HostDied("the environment's process has ended")
        return await self._host.ask_process(do, self._episode, within_s or self._step_s, **given)


class HostedLibrary(HostPool):
    """A library that plays whole episodes itself, many side by side in one host."""

    async def play(self, **given: Any) -> Any:
        """What became of an episode. Who is cancelled meanwhile cancels it in the library, too.

        An episode may take as long as it likes, but its host has to answer within `step_s`: an episode that
        holds the others up is ended, and a host where that does not help is killed. Raises EnvironmentFault
        with the library's error, and HostDied.
        """
        number, episode = self.take()
        host = self.ready(number)
        try:
            await host.start()
            await host.ask("ping", within_s=STARTS_WITHIN_S)  # a new host imports its library first
            async with self._watched(host):
                return await host.ask("play", episode, within_s=None, **given)
        except asyncio.CancelledError:
            host.tell("cancel", episode)
            raise
        finally:
            self.left(number)

    @asynccontextmanager
    async def _watched(self, host: HostProcess) -> AsyncIterator[None]:
        """Ask the host from time to time whether it lives."""
        watching = asyncio.create_task(self._watch(host))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, host: HostProcess) -> None:
        while True:
            await clock.sleep(self._step_s)
            with suppress(HostDied):  # an episode has ended, or all of the host
                await host.ask_process("ping", None, self._step_s)
