"""An OpenEnv server as a source of tasks and environments: `openenv:http://HOST:PORT`.

GET /schema              what an action is
GET /metadata            name and version
GET /list_environments   GET /NAME/splits   POST /NAME/num_tasks   POST /NAME/tasks      its tasks, if any

A listed task is `{"split": …, "index": …}` for `reset`; without a list, tasks are seeds without end.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from environments.environment import Environment
from environments.errors import EnvironmentFault, UnknownEnvironment
from environments.openenv.actions import ActionSchema
from environments.openenv.connection import MOST_MESSAGE
from environments.openenv.episode import OpenEnvEpisode
from environments.openenv.waiting_line import WaitingLine
from environments.settings import RunSettings
from environments.step import Description
from environments.task import Task, task_id
from rollout_queue.foreign_json import read_json

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
