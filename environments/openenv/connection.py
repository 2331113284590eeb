"""One episode's WebSocket connection to an OpenEnv server: a request, then its answer.

→ {"type": "reset" | "step", "data": {…}}
← {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}
← {"type": "error", "data": {"message": …, "code": …}}

A task reads all the time, because the server closes a connection whose pings are not answered, also while the
model thinks.
"""

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import msgspec

from environments.errors import EnvironmentFault, NoAction
from rollout_queue import clock
from rollout_queue.foreign_json import read_json

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
            self._ended = f"it is longer than {MOST_MESSAGE} bytes"
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
