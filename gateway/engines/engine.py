"""Ids in, ids out: one generation on one SGLang engine, streamed through its `/generate`."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec

from gateway.engines.aiohttp_transport import AiohttpTransport
from gateway.engines.httptools_transport import HttptoolsTransport
from gateway.engines.stream import EventStream, Piece, refusal
from gateway.engines.transport import (
    ConnectFailed,
    ConnectionLost,
    EngineResponse,
    EngineTransport,
    ReadTimedOut,
)
from gateway.errors import EngineFault
from rollout_queue.protocol.message import ServiceMessage

logger = logging.getLogger(__name__)

ABORT_S = 5.0
CANCEL_AGAIN_S = 2.0
ERROR_LIMIT_BYTES = 64 * 2**10


EngineHttpName = Literal["httptools", "aiohttp"]


def transport_of(name: EngineHttpName, read_timeout_s: float) -> EngineTransport:
    """The HTTP client that the setting `engine_http` names."""
    return AiohttpTransport(read_timeout_s) if name == "aiohttp" else HttptoolsTransport(read_timeout_s)


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
    """Speaks to every server of the fleet: generations over the transport, all other paths over aiohttp."""

    def __init__(self, transport: EngineTransport) -> None:
        self._transport = transport
        self._control = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3))

    async def close(self) -> None:
        await self._transport.close()
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
            response = await self._transport.post(engine_url, "/generate", body)
        except ConnectFailed as error:
            raise EngineFault("refused", f"the engine is not there: {error}") from error
        except ConnectionLost as error:
            raise EngineFault("lost", f"the engine hung up: {error}") from error
        except ReadTimedOut as error:
            raise EngineFault("stalled", f"the engine did not answer in time: {error}") from error
        if response.status != 200:
            try:
                raise refusal(response.status, await _error_body(response))
            finally:
                response.release()
        return Answering(response, EventStream(request.server))

    async def abort(self, engine_url: str, rid: str) -> None:
        """Ask the engine to stop a generation. Best effort: it also notices the closed connection."""
        try:
            async with self._control.post(
                f"{engine_url}/abort_request", json={"rid": rid}, timeout=aiohttp.ClientTimeout(total=ABORT_S)
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("generation %s is not aborted: %s", rid, error)

    async def get(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
        """GET of a control path: the body. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._control.get(url, timeout=timeout, headers=headers) as response:
            response.raise_for_status()
            return await response.read()

    async def post(
        self, url: str, message: ServiceMessage, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """POST to a control path: the status and the body. Raises aiohttp.ClientError or TimeoutError."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._control.post(
            url, json=message.model_dump(), timeout=timeout, headers=headers
        ) as response:
            return response.status, await response.read()


class Answering:
    """One answer on its way from an engine."""

    def __init__(self, response: EngineResponse, stream: EventStream) -> None:
        self._response = response
        self._stream = stream

    async def read(self) -> list[Piece]:
        """What came since the last read; the last piece says why the answer ended.

        Raises RequestRefused where the engine finds the request at fault, EngineFault where it breaks off.
        """
        try:
            data = await self._response.read()
        except ConnectionLost as error:
            raise EngineFault("broken", f"the engine hung up: {error}") from error
        except ReadTimedOut as error:
            raise EngineFault("stalled", f"the engine fell silent: {error}") from error
        if not data:
            raise EngineFault("broken", "the engine ended its answer without saying why")
        return self._stream.feed(data)

    def close(self) -> None:
        """The connection serves the next answer, where this one is over."""
        if self._stream.finished:
            self._response.leave()  # [DONE] is still to come
        else:
            self._response.release()


async def _error_body(response: EngineResponse) -> bytes:
    """As much of an error's text as is of use; a connection that ends early has said enough."""
    body = b""
    with suppress(ConnectionLost, ReadTimedOut):
        while len(body) < ERROR_LIMIT_BYTES and (data := await response.read()):
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
