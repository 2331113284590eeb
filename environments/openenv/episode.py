"""One episode on an OpenEnv server, over a connection of its own."""

import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from environments.errors import EnvironmentFault, NoAction
from environments.openenv.actions import ActionSchema
from environments.openenv.connection import EpisodeConnection
from environments.openenv.observations import observation_of, result_of, step_of, tool_message
from environments.openenv.waiting_line import WaitingLine
from environments.step import Step
from environments.task import Task

RESETS_WITHIN_S = 120.0
"""How long `reset` may take at least: it may start a sandbox."""


class OpenEnvEpisode:
    """`step_s` is how long one step may take, in seconds; `field` is the observation's field that the model
    reads alone, if it is named."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        line: WaitingLine,
        actions: ActionSchema,
        tools: Sequence[dict[str, Any]],
        step_s: float,
        field: str | None,
    ) -> None:
        self._http, self._url, self._line = http, url, line
        self._actions, self._tools = actions, tools
        self._step_s, self._field = step_s, field
        self._connection: EpisodeConnection | None = None

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._tools

    async def reset(self, task: Task) -> Step:
        """Connect, as soon as the server has room, and begin. What `reset` is rewarded with belongs to no
        answer."""
        data = await self._line.enter(lambda: self._begin("reset", task.data))
        step = step_of(observation_of(data), self._field)
        if step.ended:
            raise EnvironmentFault("the episode had ended when it began")
        return msgspec.structs.replace(step, reward=None)

    async def step(self, answer: str) -> Step:
        try:
            data = await self._act(self._actions.action_of(answer))
        except NoAction as error:
            return Step(messages=({"role": "user", "content": f"error: {error}"},))
        return step_of(observation_of(data), self._field)

    async def call(self, name: str, arguments: str) -> Step:
        try:
            action = {"type": "call_tool", "tool_name": name, "arguments": self._arguments(name, arguments)}
            data = await self._act(action)
        except NoAction as error:
            return Step(messages=(tool_message(f"error: {error}"),))
        return result_of(observation_of(data))

    async def described_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the server's environment lists, as chat completions describe them; none if it lists
        none."""
        try:
            data = await self._line.enter(lambda: self._begin("step", {"type": "list_tools"}))
        except NoAction:
            return ()
        listed = observation_of(data).observation.get("tools")
        try:
            return tuple(_tool(each) for each in listed or ())
        except (KeyError, TypeError) as error:
            raise EnvironmentFault(f"the server's list of tools is malformed: {error!r}") from None

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                await connection.close()
            finally:
                self._line.freed()

    async def _begin(self, do: str, data: dict[str, Any]) -> Any:
        """The answer to the first request of a new connection. A refused one is closed."""
        connection = await EpisodeConnection.open(self._http, f"{self._url}/ws", self._step_s)
        try:
            answer = await connection.ask(do, data, max(self._step_s, RESETS_WITHIN_S))
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        return answer

    async def _act(self, action: dict[str, Any]) -> Any:
        if self._connection is None:
            raise EnvironmentFault("the episode has no connection")
        return await self._connection.ask("step", action, self._step_s)

    def _arguments(self, name: str, arguments: str) -> dict[str, Any]:
        """Raises NoAction for what the model did wrong."""
        known = [each["function"]["name"] for each in self._tools]
        if name not in known:
            raise NoAction(f"there is no tool {name!r}, only {', '.join(known)}")
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise NoAction(f"the arguments are no JSON: {error}") from None
        if not isinstance(given, dict):
            raise NoAction("the arguments are no JSON object")
        return given


def _tool(listed: dict[str, Any]) -> dict[str, Any]:
    schema = listed.get("input_schema") or {"type": "object", "properties": {}}
    described = {"name": listed["name"], "description": listed.get("description") or "", "parameters": schema}
    return {"type": "function", "function": described}
