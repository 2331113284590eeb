"""One episode's WebSocket connection to an OpenEnv server: a request, then its answer.

→ {"type": "reset" | "step", "data": {…}}
← {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}
← {"type": "error", "data": {"message": …, "code": …}}

A task reads all the time, because the server closes a connection whose pings are not answered, also while the
model thinks.

What the model wrote becomes an action so:
1. The whole answer is a JSON object, also in a fenced block: that is the action.
2. The schema has exactly one required field: the text is that field, in the field's type.
3. There is a JSON object in the text: the last one is the action.

While the server is full, episodes wait for a place: who came first is first to try again. A refused episode
holds no connection. It tries again when an episode of this run has ended, and from time to time, because
others use the server, too.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from environments.errors import EnvironmentFault, NoAction
from environments.session_client import pause_after
from rollout_queue import clock
from rollout_queue.foreign_json import read_json

TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
OF_TOOLS = ("call_tool", "list_tools")
MOST_SHOWN = 200
"""The most characters of an answer that its error repeats."""
MOST_BRACES = 256
"""At so many braces of a text an object is looked for: each look may read the text to its end."""
NO_JSON: Any = object()
Resolve = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ActionSchema:
    """The JSON schema of an environment's actions. `metadata`, a field of every action, is left out."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self.fields: dict[str, Any] = dict(schema.get("properties") or {})
        self.fields.pop("metadata", None)
        self.required: list[str] = [name for name in schema.get("required") or () if name != "metadata"]

    @property
    def of_tools(self) -> bool:
        """Whether actions are calls of tools (the kind MCP): OpenEnv's own classes describe them, or none."""
        return not self.fields or self.fields.get("type", {}).get("const") in OF_TOOLS

    def action_of(self, answer: str) -> dict[str, Any]:
        """The action. Raises NoAction with a sentence for the model."""
        whole = _json_of(_without_fence(answer.strip()))
        if isinstance(whole, dict):
            return whole
        if self.of_tools:
            raise NoAction("an action is a call of one of the tools")
        if len(self.required) == 1:
            (name,) = self.required
            return {name: self._value(name, answer)}
        if (last := _last_object(answer)) is not None:
            return last
        raise NoAction(f"an action is a JSON object with the fields {', '.join(self.fields)}")

    def _value(self, name: str, answer: str) -> Any:
        """The text in the field's type. A free text stays as it is; spaces around another value are not part
        of it."""
        field = self._resolved(self.fields.get(name, {}))
        kinds = _types(field, self._resolved)
        if kinds == {"string"} and not {"enum", "const"} & set(field):
            return answer
        text = answer.strip()
        value = _json_of(text)
        if value is not NO_JSON and (not kinds or any(_is_a(value, kind) for kind in kinds - {"string"})):
            return value
        if not kinds or "string" in kinds:
            return text
        wanted = " or ".join(sorted(kinds))
        raise NoAction(f"{text[:MOST_SHOWN]!r} is no {wanted}, which the field {name!r} needs")

    def _resolved(self, field: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a reference to `#/$defs/NAME` means."""
        name = str(field.get("$ref", "")).rpartition("/")[2]
        found: Mapping[str, Any] = (self._schema.get("$defs") or {}).get(name, field)
        return found


def _types(field: Mapping[str, Any], resolved: Resolve) -> set[str]:
    """The JSON types that a field may have; none if the schema does not say."""
    kind = field.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    choices = field.get("anyOf") or field.get("oneOf") or ()
    return {kind for each in choices for kind in _types(resolved(each), lambda deeper: deeper)}


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return kind in TYPES and isinstance(value, TYPES[kind])


def _json_of(text: str) -> Any:
    """The value, or NO_JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NO_JSON


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _without_fence(text: str) -> str:
    """The content of a text that is one fenced block."""
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        return text[text.index("\n") + 1 : -3].strip()
    return text


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object that is not part of another one."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    found, place = None, text.find("{")
    for _ in range(MOST_BRACES):
        if place < 0:
            break
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    return found


MOST_MESSAGE = 32 * 2**20
"""The most bytes of one message of the server."""
MOST_ERROR = 2000
"""The most characters of an error's text that the model reads."""
CLOSES_WITHIN_S = 5.0
FULL = (429, 503)
"""What a server, or a balancer before it, answers instead of opening a connection while it has no room."""


class ServerIsFull(Exception):
    """The server plays as many episodes as it can. Another attempt may succeed."""


class EpisodeConnection:
    """Every request raises EnvironmentFault if the connection ends or an answer takes longer than it may."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2)
        self._reader = asyncio.create_task(self._read())
        self._owed = False
        """Whether the server has not answered yet. It does not hear a goodbye before it has."""
        self._ended = "the server closed the connection"

    @classmethod
    async def open(cls, http: aiohttp.ClientSession, url: str, within_s: float) -> "EpisodeConnection":
        """Connect to the WebSocket at `url`. Raises ServerIsFull."""
        try:
            async with clock.timeout(within_s):
                socket = await http.ws_connect(url, max_msg_size=MOST_MESSAGE)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in FULL:
                raise ServerIsFull(f"it answered {error.status}") from None
            raise EnvironmentFault(f"{url} answered {error.status}, and opened no WebSocket") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EnvironmentFault(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None
        return cls(socket)

    async def ask(self, do: str, data: dict[str, Any], within_s: float) -> Any:
        """The data of the observation. Raises ServerIsFull, and NoAction for an action that the server's
        schema refuses."""
        self._owed = True
        try:
            async with clock.timeout(within_s):
                with contextlib.suppress(aiohttp.ClientError, OSError):  # the answer may say why
                    await self._socket.send_str(json.dumps({"type": do, "data": data}))
                answer = await self._answers.get()
        except TimeoutError:
            raise EnvironmentFault(f"the server did not answer {do!r} within {within_s:.0f} s") from None
        self._owed = False
        if answer is None:
            self._answers.put_nowait(None)  # for the next request, too
            raise EnvironmentFault(f"no answer to {do!r}: {self._ended}")
        return _data_of(do, answer)

    async def close(self) -> None:
        """Say goodbye, and wait a little until the server has freed the episode's place."""
        try:
            if not self._owed:
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with clock.timeout(CLOSES_WITHIN_S):
                        await self._socket.send_str('{"type": "close"}')
                        await asyncio.wait({self._reader})
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with clock.timeout(CLOSES_WITHIN_S):
                    await self._socket.close()

    async def _read(self) -> None:
        """Hand on what the server says, and at the end None."""
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await self._answers.put(message.data.encode())
            elif message.type is aiohttp.WSMsgType.ERROR:
                break
        if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._ended = f"the answer is longer than {MOST_MESSAGE} bytes"
        elif error := self._socket.exception():
            self._ended = f"the connection broke: {error}"
        await self._answers.put(None)


def _data_of(do: str, answer: bytes) -> Any:
    try:
        said = read_json(answer)
        kind, data = said["type"], said["data"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise EnvironmentFault(f"the answer to {do!r} is malformed: {answer[:200]!r}") from None
    if kind == "observation":
        return data
    if kind != "error" or not isinstance(data, dict):
        raise EnvironmentFault(f"the server answered {do!r} with {kind!r}")
    code, text = data.get("code"), str(data.get("message"))
    if code == "CAPACITY_REACHED":
        raise ServerIsFull(text)
    if code == "VALIDATION_ERROR" and do == "step":
        raise NoAction(_complaints(data.get("errors")) or text)
    raise EnvironmentFault(f"{code}: {text}"[:MOST_ERROR])


def _complaints(errors: Any) -> str:
    """What the schema has against an action: `number: Field required; …`."""
    try:
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors]
    except (KeyError, TypeError):
        return ""
    return "; ".join(found)[:MOST_ERROR]


T = TypeVar("T")


class WaitingLine:
    """Episodes that wait for a place, first come first served. It gives up if the server lets nobody in for
    `waits_s`."""

    def __init__(self, waits_s: float) -> None:
        self._waits_s = waits_s
        self._line: deque[asyncio.Event] = deque()
        self._let_in_at = 0.0

    async def enter(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, made again while it raises ServerIsFull. Raises EnvironmentFault."""
        if not self._line:
            try:
                return await self._try(attempt)
            except ServerIsFull:
                pass
        turn = asyncio.Event()
        self._line.append(turn)
        try:
            return await self._wait(attempt, turn)
        finally:
            self._line.remove(turn)
            self.freed()  # there may be room for the next one, too

    def freed(self) -> None:
        """There may be room: the first one in the line tries now."""
        if self._line:
            self._line[0].set()

    async def _wait(self, attempt: Callable[[], Awaitable[T]], turn: asyncio.Event) -> T:
        began, refused = clock.monotonic(), 0
        while True:
            if await _within(turn, pause_after(refused)):
                refused = 0
            turn.clear()
            if self._line[0] is not turn:  # others came first
                continue
            try:
                return await self._try(attempt)
            except ServerIsFull as full:
                refused += 1
                if clock.monotonic() - max(began, self._let_in_at) > self._waits_s:
                    raise EnvironmentFault(
                        f"the server has let nobody in for {self._waits_s:.0f} s: {full}"
                    ) from None

    async def _try(self, attempt: Callable[[], Awaitable[T]]) -> T:
        result = await attempt()
        self._let_in_at = clock.monotonic()
        return result


async def _within(turn: asyncio.Event, seconds: float) -> bool:
    try:
        async with clock.timeout(seconds):
            await turn.wait()
    except TimeoutError:
        return False
    return True
