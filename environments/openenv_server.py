"""An OpenEnv server as a source of tasks and environments: `openenv:http://HOST:PORT`.

GET /schema              what an action is
GET /metadata            name and version
GET /list_environments   GET /NAME/splits   POST /NAME/num_tasks   POST /NAME/tasks      its tasks, if any

A listed task is `{"split": …, "index": …}` for `reset`; without a list, tasks are seeds without end. Each
episode has a connection of its own.

Of an observation, a field that is null or empty says nothing, and `metadata` is shown only if nothing else is
there. If one text is left, the model reads it as it is; otherwise it reads the fields as JSON. The option
`text` names a field that the model reads alone. `metadata` gives the numbers that are recorded.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from environments.environment import (
    Description,
    Environment,
    Message,
    Step,
    Task,
    tool_arguments,
    tool_message,
)
from environments.errors import EnvironmentFault, NoAction, UnknownEnvironment
from environments.openenv_connection import MOST_MESSAGE, ActionSchema, EpisodeConnection, WaitingLine
from environments.settings import RunSettings
from environments.task_ids import task_id
from rollout_queue.foreign_json import read_json

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
            given = tool_arguments(self._tools, name, arguments)
            data = await self._act({"type": "call_tool", "tool_name": name, "arguments": given})
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


def _tool(listed: dict[str, Any]) -> dict[str, Any]:
    schema = listed.get("input_schema") or {"type": "object", "properties": {}}
    described = {"name": listed["name"], "description": listed.get("description") or "", "parameters": schema}
    return {"type": "function", "function": described}


EMPTY: tuple[Any, ...] = (None, "", [], {})
BROKEN = "transport_error"


class ObservationData(msgspec.Struct, frozen=True):
    """The `data` of a server's message `observation`. `reward` belongs to the last action; null is no
    opinion."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False

    @property
    def metadata(self) -> dict[str, Any]:
        given = self.observation.get("metadata")
        return given if isinstance(given, dict) else {}


def observation_of(data: Any) -> ObservationData:
    """Raises EnvironmentFault if it is malformed."""
    try:
        return msgspec.convert(data, ObservationData)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"the server's observation is malformed: {error}") from None


def step_of(data: ObservationData, field: str | None) -> Step:
    """The step, with a message of the user. `field` is the only one that the model reads, if it is named."""
    return _step(data, {"role": "user", "content": _shown(data, field)})


def result_of(data: ObservationData) -> Step:
    """The step of a tool's call. Raises EnvironmentFault if the tool was not reached."""
    error = data.observation.get("error")
    if isinstance(error, dict):
        if error.get("error_type") == BROKEN:
            raise EnvironmentFault(f"a tool was not reached: {error.get('message')}")
        return _step(data, tool_message(f"error: {error.get('message')}"))
    return _step(data, tool_message(_tool_text(data.observation.get("result"))))


def _step(data: ObservationData, message: Message) -> Step:
    reward = None if data.reward is None else float(data.reward)
    if reward is not None and not math.isfinite(reward):
        raise EnvironmentFault(f"a reward must be finite, not {reward}")
    numbers = {
        str(name): float(value)
        for name, value in data.metadata.items()
        if isinstance(value, bool | int | float) and math.isfinite(value)
    }
    return Step(messages=(message,), reward=reward, terminated=data.done, metrics=numbers)


def _shown(data: ObservationData, field: str | None) -> str:
    if field is not None:
        if field not in data.observation:
            known = ", ".join(data.observation)
            raise EnvironmentFault(f"the observation has no field {field!r}, only {known}")
        return _text(data.observation[field])
    fields = {name: value for name, value in data.observation.items() if name != "metadata"}
    said = _that_say_something(fields) or _that_say_something(data.metadata)
    values = list(said.values())
    return _text(values[0] if len(values) == 1 and isinstance(values[0], str) else said)


def _that_say_something(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not any(value == each for each in EMPTY)}


def _tool_text(result: Any) -> str:
    """The texts of an MCP result; another result as JSON."""
    content = result.get("content") if isinstance(result, dict) else None
    texts = [each["text"] for each in content or () if isinstance(each, dict) and _has_text(each)]
    if content and len(texts) == len(content):
        return "\n".join(texts)
    return _text(result)


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


LISTS_NONE = (404, 405, 501)
SEEDS = 1_000_003
"""Tasks of one run's seed do not overlap with those of the next one."""


class ServerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a run: `text` names the field of observations that the model reads alone, `split` the
    tasks, and `reset` gives more parameters of `reset`."""

    text: str | None = None
    split: str | None = None
    reset: dict[str, Any] = {}


class OpenEnvServer:
    """Plays each episode over a connection of its own."""

    def __init__(self, settings: RunSettings) -> None:
        try:
            self._options = msgspec.convert(settings.options, ServerOptions)
        except msgspec.ValidationError as error:
            raise UnknownEnvironment(f"options of an OpenEnv server: {error}") from None
        self._url = settings.name.rstrip("/")
        self._step_s = settings.step_s
        self._line = WaitingLine(settings.wait_s)
        self._http: aiohttp.ClientSession | None = None
        self._actions = ActionSchema({})
        self._description: Description | None = None
        self._split: str | None = None

    @property
    def description(self) -> Description:
        if self._description is None:
            raise RuntimeError("the server has not been asked")
        return self._description

    async def __aenter__(self) -> "OpenEnvServer":
        """Ask the server what it is. Raises UnknownEnvironment."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            self._actions = ActionSchema((await self._ask("GET", "/schema"))["action"])
            described = await self._ask("GET", "/metadata", absent=LISTS_NONE) or {}
            count = await self._count_tasks()
            tools = await self._tools() if self._actions.of_tools else ()
        except (EnvironmentFault, KeyError, TypeError, AttributeError, IndexError) as error:
            await self.__aexit__()
            raise UnknownEnvironment(
                f"no environment of an OpenEnv server at {self._url!r}: {str(error) or type(error).__name__}"
            ) from None
        except BaseException:
            await self.__aexit__()
            raise
        self._description = Description(
            name=f"openenv:{described.get('name') or self._url}",
            version=str(described.get("version") or ""),
            tools=tools,
            task_count=count,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        """Listed tasks are the same for every seed."""
        name, more = self.description.name, self._options.reset
        if (known := self.description.task_count) is not None:
            return [
                Task(task_id(name, self._split, index), {"split": self._split, "index": index, **more})
                for index in range(start, min(known, start + count))
            ]
        first = seed * SEEDS + start
        return [Task(task_id(name, each), {"seed": each, **more}) for each in range(first, first + count)]

    def environment(self) -> Environment:
        return self._episode(self.description.tools)

    def _episode(self, tools: Sequence[dict[str, Any]]) -> OpenEnvEpisode:
        if self._http is None:
            raise RuntimeError("the server has not been asked")
        return OpenEnvEpisode(
            self._http, self._url, self._line, self._actions, tools, self._step_s, self._options.text
        )

    async def _tools(self) -> tuple[dict[str, Any], ...]:
        asking = self._episode(())
        try:
            return await asking.described_tools()
        finally:
            await asking.close()

    async def _count_tasks(self) -> int | None:
        """How many tasks the split has; None if the server lists none. The split is the option's, or the
        first one for training, or the first one."""
        names = await self._ask("GET", "/list_environments", absent=LISTS_NONE)
        room = f"/{quote(names[0], safe='')}" if names else ""
        listed = await self._ask("GET", f"{room}/splits", absent=LISTS_NONE) if names else []
        splits = [each["name"] for each in listed or ()]
        wanted = self._options.split
        if wanted is not None and wanted not in splits:
            raise EnvironmentFault(f"it has no split {wanted!r}, only {', '.join(splits) or 'seeds'}")
        if not splits:
            return None
        self._split = wanted or next((each["name"] for each in listed if each["type"] == "train"), splits[0])
        counted = await self._ask("POST", f"{room}/num_tasks", {"split": self._split}, LISTS_NONE)
        if counted is not None:
            return int(counted["num_tasks"])
        return len((await self._ask("POST", f"{room}/tasks", {"split": self._split}))["tasks"])

    async def _ask(self, method: str, path: str, body: Any = None, absent: tuple[int, ...] = ()) -> Any:
        """The answer's JSON; None for a status in `absent`. Raises EnvironmentFault."""
        if self._http is None:
            raise RuntimeError("the server has not been asked")
        timeout = aiohttp.ClientTimeout(total=self._step_s)
        try:
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as reply:
                content = bytearray()
                async for part in reply.content.iter_chunked(65536):
                    content += part
                    if len(content) > MOST_MESSAGE:
                        raise EnvironmentFault(f"the answer to {path} is longer than {MOST_MESSAGE} bytes")
                if reply.status in absent:
                    return None
                if reply.status >= 300:
                    text = content[:200].decode(errors="replace")
                    raise EnvironmentFault(f"{method} {path} was answered with {reply.status}: {text}")
                return read_json(content)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EnvironmentFault(f"{method} {path}: {str(error) or type(error).__name__}") from None
