"""Ids in, ids out: one generation on one SGLang engine, streamed through its `/generate`."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from gateway.engines.http import ConnectFailed, ConnectionLost, EngineHttp, Line, Silence
from gateway.engines.stream import EventStream, Piece, refusal, version_number
from gateway.errors import EngineFault

__all__ = ["EngineClient", "EngineRequest", "Piece", "drain", "version_number"]

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
ABORT_S = 5.0
CANCEL_AGAIN_S = 2.0
ERROR_LIMIT_BYTES = 64 * 2**10


class EngineRequest(msgspec.Struct, frozen=True):
    """What the engine is asked: `rid` names the generation, for abort; parameters in SGLang's names."""

    rid: str
    input_ids: list[int]
    parameters: dict[str, Any]
    stream_interval: int
    """Tokens per event: 1 for a client that streams, more for one that waits for the whole answer."""
    top_logprobs: int = 0
    server: str = ""
    """The id of who is asked; its pieces carry it."""


_encode = msgspec.json.Encoder().encode


class EngineClient:
    """Speaks to every engine of the fleet: generations on the quick line, all else on a general one."""

    def __init__(self, timeout_s: float) -> None:
        self._http = EngineHttp(CONNECT_S, timeout_s)
        self._control = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3))

    async def close(self) -> None:
        self._http.close()
        await self._control.close()

    async def generate(self, engine_url: str, request: EngineRequest) -> "Answering":
        """Ask for one answer; gives it once it has begun. Whoever called closes it.

        Raises RequestRefused where the request is at fault, EngineFault where the engine is.
        """
        body = _encode(
            {
                "rid": request.rid,
                "input_ids": request.input_ids,
                "sampling_params": {**request.parameters, "stream_interval": request.stream_interval},
                "return_logprob": True,
                "top_logprobs_num": request.top_logprobs,
                "stream": True,
            }
        )
        try:
            line = await self._http.post(engine_url, "/generate", body)
        except ConnectFailed as error:
            raise EngineFault("refused", f"the engine is not there: {error}") from error
        except ConnectionLost as error:
            raise EngineFault("lost", f"the engine hung up: {error}") from error
        except Silence as error:
            raise EngineFault("stalled", f"the engine did not answer in time: {error}") from error
        if line.status != 200:
            try:
                raise refusal(line.status, await _error_body(line))
            finally:
                line.release()
        return Answering(line, EventStream(request.server))

    async def abort(self, engine_url: str, rid: str) -> None:
        """Ask the engine to stop a generation. Best effort: it also notices the closed connection."""
        try:
            async with self._control.post(
                f"{engine_url}/abort_request", json={"rid": rid}, timeout=aiohttp.ClientTimeout(total=ABORT_S)
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("generation %s is not aborted: %s", rid, error)

    async def get_json(self, url: str, timeout_s: float, headers: dict[str, str] | None = None) -> Any:
        """GET of a control path. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._control.get(url, timeout=timeout, headers=headers) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    async def post_json(
        self, url: str, body: Any, timeout_s: float, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """POST to a control path: its status and JSON. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._control.post(url, json=body, timeout=timeout, headers=headers) as response:
            return response.status, await response.json(content_type=None)


class Answering:
    """One answer on its way from an engine."""

    def __init__(self, line: Line, stream: EventStream) -> None:
        self._line = line
        self._stream = stream

    async def read(self) -> list[Piece]:
        """What came since the last read; the last piece says why the answer ended.

        Raises RequestRefused where the engine finds the request at fault, EngineFault where it breaks off.
        """
        try:
            data = await self._line.read()
        except ConnectionLost as error:
            raise EngineFault("broken", f"the engine hung up: {error}") from error
        except Silence as error:
            raise EngineFault("stalled", f"the engine fell silent: {error}") from error
        if not data:
            raise EngineFault("broken", "the engine ended its answer without saying why")
        return self._stream.feed(data)

    def close(self) -> None:
        """The connection serves the next answer, where this one is over."""
        if self._stream.finished:
            self._line.leave()  # [DONE] is still to come
        else:
            self._line.release()


async def _error_body(line: Line) -> bytes:
    """As much of an error's text as is of use; a connection that ends early has said enough."""
    body = b""
    with suppress(ConnectionLost, Silence):
        while len(body) < ERROR_LIMIT_BYTES and (data := await line.read()):
            body += data
    return body


async def drain(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and await their end.

    It is said again to those that go on: redis-py sends through asyncio.wait_for, which in Python 3.11 loses
    a cancellation that comes together with what it waits for.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
