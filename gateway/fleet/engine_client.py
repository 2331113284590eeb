"""Speaks to the servers of the fleet: streams answers, aborts them, reads status and requests reloads.

prompt ids ──generate──▶ EngineAnswer ──follow──▶ chunks of output ids with their logprobs
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import aiohttp
from msgspec import UNSET

from gateway.errors import EngineFault
from gateway.fleet.engine_connection import (
    IDLE_LIMIT_S,
    NO_HEADERS,
    ConnectFailed,
    ConnectionLost,
    EngineConnection,
    EngineConnections,
    ReadTimedOut,
    engine_connector,
)
from gateway.fleet.event_stream import EventStream, OutputChunk, engine_error
from gateway.fleet.generate_request import Adapter, GenerateBody, encode
from rollout_queue import clock
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.tracing import traceparent

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
WHOLE_LIMIT_BYTES = 256 * 2**20
"""The longest reply that does not stream: 100 bytes for each of 20 alternatives of 130,000 tokens."""
ERROR_LIMIT_BYTES = 64 * 2**10
"""At most this much of an error's body is read."""


class EngineClient:
    """Speaks to every server of the fleet: generations over the transport, everything else over aiohttp."""

    def __init__(self, read_timeout_s: float, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """`read_timeout_s`: the longest wait for the next byte of an answer. `headers`: what engines get with
        each request."""
        self._transport, self._headers = EngineConnections(read_timeout_s, headers=headers), headers
        # aiohttp's own timeouts would count time in which this process stood still.
        unlimited = aiohttp.ClientTimeout(total=None)
        self._control = aiohttp.ClientSession(connector=engine_connector(IDLE_LIMIT_S), timeout=unlimited)

    async def close(self) -> None:
        await self._transport.close()
        await self._control.close()

    async def generate(
        self, engine_url: str, body: GenerateBody, server_id: str, adapter: Adapter | None = None
    ) -> "EngineAnswer":
        """Request one answer; returns when the answer has begun. The caller closes it.

        Raises RequestRefused if the request is at fault, EngineFault if the engine is.
        """
        response = await self._post(engine_url, body)
        experts_from = None if body.routed_experts_start_len is UNSET else body.routed_experts_start_len
        return EngineAnswer(response, EventStream(server_id, adapter and adapter.version, experts_from))

    async def whole(self, engine_url: str, body: GenerateBody) -> bytes:
        """The reply to a request that does not stream. Raises RequestRefused and EngineFault."""
        response = await self._post(engine_url, body)
        parts, size = [], 0
        try:
            while data := await response.read():
                parts.append(data)
                size += len(data)
                if size > WHOLE_LIMIT_BYTES:
                    raise EngineFault("nonsense", f"the reply is longer than {WHOLE_LIMIT_BYTES} bytes")
        except ConnectionLost as error:
            raise EngineFault("broken", f"the engine closed the connection: {error}") from error
        except ReadTimedOut as error:
            raise EngineFault("stalled", f"the engine sent nothing for too long: {error}") from error
        finally:
            response.release()
        return b"".join(parts)

    async def _post(self, engine_url: str, body: GenerateBody) -> EngineConnection:
        """The reply once its status has arrived. Raises RequestRefused and EngineFault."""
        try:
            response = await self._transport.post(engine_url, "/generate", encode(body), traceparent())
        except ConnectFailed as error:
            raise EngineFault("refused", f"the engine cannot be reached: {error}") from error
        except ConnectionLost as error:
            raise EngineFault("lost", f"the engine closed the connection: {error}") from error
        except ReadTimedOut as error:
            raise EngineFault("stalled", f"the engine did not answer in time: {error}") from error
        if response.status != 200:
            try:
                raise engine_error(response.status, await _error_body(response))
            finally:
                response.release()
        return response

    async def abort(self, engine_url: str, rid: str) -> None:
        """Ask the engine to stop a generation. If this fails, the closed connection stops it."""
        try:
            url, body = f"{engine_url}/abort_request", {"rid": rid}
            async with (
                clock.real_timeout(ABORT_TIMEOUT_S),
                self._control.post(url, json=body, headers=self._headers),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("generation %s could not be aborted: %s", rid, error)

    async def responds(self, url: str, timeout_s: float) -> bool:
        """Whether the engine responds to a GET. A 502 or 504 comes from a proxy that does not reach it."""
        try:
            async with (
                clock.real_timeout(timeout_s),
                self._control.get(url, headers=self._headers, allow_redirects=False) as response,
            ):
                return response.status not in (502, 504)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def get(self, url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a GET; without `headers`, it goes to an engine. Raises aiohttp.ClientError or
        TimeoutError."""
        headers = self._headers if headers is None else headers
        async with clock.real_timeout(timeout_s), self._control.get(url, headers=headers) as response:
            response.raise_for_status()
            return await response.read()

    async def request(
        self, method: str, url: str, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """The status and the body of a request without a body. Raises aiohttp.ClientError or TimeoutError."""
        async with (
            clock.real_timeout(timeout_s),
            self._control.request(method, url, headers=headers) as response,
        ):
            return response.status, await response.read()

    async def post(
        self, url: str, message: ServiceMessage, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """The status and the body of a POST. Raises aiohttp.ClientError or TimeoutError."""
        body = message.model_dump()
        async with (
            clock.real_timeout(timeout_s),
            self._control.post(url, json=body, headers=headers) as response,
        ):
            return response.status, await response.read()


class EngineAnswer:
    """One answer as an engine streams it."""

    def __init__(self, response: EngineConnection, stream: EventStream) -> None:
        self._response = response
        self._stream = stream

    async def follow(self, take: Callable[[list[OutputChunk]], bool]) -> None:
        """Call `take` with the chunks of each arrival, as soon as they arrive and outside of the caller's
        task, until it returns False. The last chunk says why the answer ended.

        Raises what `take` raises, RequestRefused if the engine finds the request at fault, EngineFault if the
        stream breaks off.
        """
        feed = self._stream.feed
        try:
            if await self._response.follow(lambda data: take(feed(data))):
                return
        except ConnectionLost as error:
            raise EngineFault("broken", f"the engine closed the connection: {error}") from error
        except ReadTimedOut as error:
            raise EngineFault("stalled", f"the engine sent nothing for too long: {error}") from error
        raise EngineFault("broken", "the engine ended its answer without a reason")

    def close(self) -> None:
        """Give the connection back to the pool if the answer is complete; otherwise close it."""
        if self._stream.finished:
            self._response.leave()  # [DONE] is still to come
        else:
            self._response.release()


async def _error_body(response: EngineConnection) -> bytes:
    """As much of an error's body as arrives, up to the limit."""
    body = b""
    with suppress(ConnectionLost, ReadTimedOut):
        while len(body) < ERROR_LIMIT_BYTES and (data := await response.read()):
            body += data
    return body
