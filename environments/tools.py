"""Environments whose model may also call the tools of MCP servers.

environment ──┐
              ├─▶ EnvironmentWithTools ─▶ agent loop
MCP servers ──┘   one host, in which each episode has connections of its own
"""

import asyncio
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from environments.environment import (
    Description,
    Environment,
    EnvironmentSource,
    Step,
    Task,
    tool_arguments,
    tool_message,
    tool_names,
)
from environments.errors import EnvironmentFault, NoAction, UnknownEnvironment
from environments.hosts import HostProcess
from environments.settings import ToolServerSettings

VARIABLE = re.compile(r"\$\{(\w+)\}")
OPENS_WITHIN_S = 120.0
"""How long the servers of an episode may take to start and to list their tools."""
ENDS_WITHIN_S = 20.0
"""How long the servers of all episodes may take to end."""
SPARE_S = 10.0
"""A host that answers so much later than it was told to hangs."""


class Tool(NamedTuple):
    """A tool by the name that the model reads, and where it is."""

    server: str
    name: str
    described: dict[str, Any]


class ToolServers:
    """A source of environments, each with connections of its own to all servers. `step_s` is how long a call
    may take, in seconds."""

    def __init__(
        self,
        source: EnvironmentSource,
        servers: Mapping[str, ToolServerSettings],
        command: Sequence[str],
        directory: Path,
        step_s: float,
    ) -> None:
        self._source, self._servers, self._step_s = source, servers, step_s
        self._host = HostProcess(command, directory, OPENS_WITHIN_S, ENDS_WITHIN_S)
        self._starting = asyncio.Lock()
        self._generation = 0
        self._numbers = itertools.count()

    @property
    def description(self) -> Description:
        return self._source.description

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        return await self._source.tasks(seed, start, count)

    def environment(self) -> Environment:
        return EnvironmentWithTools(self._source.environment(), self, str(next(self._numbers)))

    async def __aenter__(self) -> "ToolServers":
        """Start the environment, and connect once, so that a mistake is told now. Raises
        UnknownEnvironment."""
        await self._source.__aenter__()
        try:
            probe = str(next(self._numbers))
            offered = await self.open(probe)
            self.close(probe)
            self._refuse_doubles([*tool_names(self._source.description.tools), *offered])
        except EnvironmentFault as error:
            await self.__aexit__()
            raise UnknownEnvironment(f"the tool servers cannot be used: {error}") from None
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(self._host.close(), self._source.__aexit__(*error))

    async def open(self, episode: str) -> dict[str, Tool]:
        """Connect an episode; returns the tools by the names that the model reads. Raises
        EnvironmentFault."""
        async with self._starting:
            await self._host.start()
            if self._generation != self._host.generation:
                connections = {name: connection_of(each) for name, each in self._servers.items()}
                await self._host.ask("start", None, OPENS_WITHIN_S, servers=connections)
                self._generation = self._host.generation
        listed = await self._ask("open", episode, OPENS_WITHIN_S)
        return {each.described["function"]["name"]: each for each in self._offered(listed)}

    async def call(self, episode: str, tool: Tool, arguments: dict[str, Any]) -> str:
        """The tool's result, or its error, as text. Raises EnvironmentFault if the server is unusable."""
        given = {"server": tool.server, "name": tool.name, "arguments": arguments}
        return str(await self._ask("call", episode, self._step_s, **given))

    def close(self, episode: str) -> None:
        self._host.tell("close", episode)

    async def _ask(self, do: str, episode: str, within_s: float, **given: Any) -> Any:
        return await self._host.ask(do, episode, within_s + SPARE_S, **given, limit_s=within_s)

    def _offered(self, listed: Sequence[Mapping[str, Any]]) -> list[Tool]:
        offered = []
        for server, settings in self._servers.items():
            known = {each["name"]: each for each in listed if each["server"] == server}
            wanted = known if settings.tools is None else settings.tools
            for name in wanted:
                if name not in known:
                    raise EnvironmentFault(f"{server} has no tool {name!r}, only {', '.join(known)}")
                function = {
                    "name": settings.prefix + name,
                    "description": known[name]["description"],
                    "parameters": known[name]["parameters"],
                }
                offered.append(Tool(server, name, {"type": "function", "function": function}))
        self._refuse_doubles(tool_names([each.described for each in offered]))
        return offered

    def _refuse_doubles(self, names: Sequence[str]) -> None:
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise EnvironmentFault(
                f"there are two tools {doubled[0]!r}: give the tools of one server a `prefix`"
            )


class EnvironmentWithTools:
    """One episode: the environment's own tools, and those of the servers."""

    def __init__(self, environment: Environment, servers: ToolServers, episode: str) -> None:
        self._environment, self._servers, self._episode = environment, servers, episode
        self._offered: dict[str, Tool] = {}

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return [*self._environment.tools, *(each.described for each in self._offered.values())]

    async def reset(self, task: Task) -> Step:
        self._offered = await self._servers.open(self._episode)
        return await self._environment.reset(task)

    async def step(self, answer: str) -> Step:
        return await self._environment.step(answer)

    async def call(self, name: str, arguments: str) -> Step:
        if name not in self._offered and name in tool_names(self._environment.tools):
            return await self._environment.call(name, arguments)
        try:
            given = tool_arguments(self.tools, name, arguments)
        except NoAction as error:
            return _said(f"error: {error}")
        return _said(await self._servers.call(self._episode, self._offered[name], given))

    async def close(self) -> None:
        self._servers.close(self._episode)
        await self._environment.close()


def connection_of(server: ToolServerSettings) -> dict[str, Any]:
    """What is needed to connect. Raises UnknownEnvironment if a variable is not set."""
    wanted = {"command", "args", "env", "cwd"} if server.command else {"url", "headers", "transport"}
    given: dict[str, Any] = _expanded(server.model_dump(include=wanted, exclude_none=True, mode="json"))
    return given


def _expanded(value: Any) -> Any:
    """The same with the values of `${VARIABLES}`."""
    if isinstance(value, dict):
        return {name: _expanded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    if missing := [name for name in VARIABLE.findall(value) if name not in os.environ]:
        raise UnknownEnvironment(f"the variable {missing[0]} of a tool server is not set")
    return VARIABLE.sub(lambda found: os.environ[found[1]], value)


def _said(text: str) -> Step:
    return Step(messages=(tool_message(text),))
