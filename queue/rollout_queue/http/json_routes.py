"""Routes of FastAPI that count the values of a JSON body before they decode it (`foreign_json`).

So no body keeps the process from its other requests, whatever is in it. Large bodies are received in small
pieces; long work is done in a thread, one by one. Owners, such as client keys, take turns: much work of one
delays no other.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from rollout_queue.foreign_json import LARGE_BYTES, TooManyValues, check_values, read_json
from rollout_queue.http.callers import presented_key
from rollout_queue.http.errors import ApiError


class FairTurns:
    """A semaphore whose waiting owners take turns; those of one owner go in the order of their arrival."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """By owner, the next one first."""
        self._last_owner: Hashable = None
        """Who had the last turn."""

    @asynccontextmanager
    async def of(self, owner: Hashable) -> AsyncIterator[None]:
        """A block that runs when it is its owner's turn."""
        await self._come(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _come(self, owner: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came just when the caller left
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        if self._last_owner in self._waiting:
            self._waiting[self._last_owner] = self._waiting.pop(self._last_owner)
        while self._waiting:
            owner, line = next(iter(self._waiting.items()))
            turn = line.popleft()
            if not line:
                del self._waiting[owner]
            if not turn.done():  # else its caller has left
                self._last_owner = owner
                turn.set_result(None)
                return
        self._free += 1


R = TypeVar("R")

AT_ONCE_BYTES = 32 * 2**10
"""The work on a smaller body is done at once, since a thread would cost more time."""
UNPACED_BYTES = 64 * 2**10
"""Only what a body has beyond these bytes is received in turns."""


@dataclass
class _Turns:
    """Those of one event loop."""

    work: FairTurns = field(default_factory=lambda: FairTurns(1))
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "bodies"))
    """Most work holds the interpreter's lock, so two threads are no faster, and the loop waits for both. Work
    whose request has left goes on to its end."""
    iterations: FairTurns = field(default_factory=lambda: FairTurns(1))


class _TakesLong(Exception):
    """Work that was begun on the loop belongs in a thread."""


_ON_LOOP: ContextVar[bool] = ContextVar("ON_LOOP", default=False)
"""Whether the work that goes on may be done again in a thread."""
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


def _turns() -> _Turns:
    loop = asyncio.get_running_loop()
    if (turns := _TURNS.get(loop)) is None:
        turns = _TURNS[loop] = _Turns()
    return turns


async def worked(owner: Hashable, body: bytes, work: Callable[..., R], *arguments: Any) -> R:
    """What the work on a body of this owner gives. It is done at once for a small body, unless it calls
    `takes_long`."""
    if len(body) <= AT_ONCE_BYTES:
        token = _ON_LOOP.set(True)
        try:
            return work(*arguments)
        except _TakesLong:
            pass
        finally:
            _ON_LOOP.reset(token)
    turns, context = _turns(), copy_context()
    async with turns.work.of(owner):
        run = asyncio.get_running_loop().run_in_executor
        return await run(turns.thread, partial(context.run, work, *arguments))


def takes_long() -> None:
    """Called by work on a body before it does what takes milliseconds: if it holds the loop up, it ends here,
    and is done again in a thread."""
    if _ON_LOOP.get():
        raise _TakesLong


async def next_iteration(owner: Hashable) -> None:
    """Wait for an iteration of the loop that is this owner's: each is one caller's."""
    async with _turns().iterations.of(owner):
        await asyncio.sleep(0)


class PacedReceive:
    """ASGI's `receive` of one request. Each iteration of the loop receives one piece of one large body."""

    def __init__(self, receive: Receive, owner: Callable[[], Hashable]) -> None:
        self._receive, self._owner, self._size = receive, owner, 0

    async def __call__(self) -> Message:
        if self._size > UNPACED_BYTES:
            await next_iteration(self._owner())
        message = await self._receive()
        self._size += len(message.get("body", b""))
        return message


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route whose body has at most so many values; more is a 400."""

    most_values = 20_000
    """What fits into the longest metadata, and more: FastAPI takes microseconds for each wrong value."""

    def check(self, body: bytes) -> None:
        """Raises TooManyValues."""
        check_values(body, self.most_values)

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def bounded(request: Request) -> Response:
            body = await request.body()
            value = await worked(presented_key(request.headers), body, self._decoded, body)
            return await handler(_ReadRequest(request, body, value))

        return bounded

    def _decoded(self, body: bytes) -> Any:
        """The value of a body; None if it cannot be read. Raises ApiError 400 for too many values."""
        try:
            self.check(body)
            return read_json(body)
        except TooManyValues as error:
            raise ApiError(400, f"the body has {error}", code="too_many_values") from error
        except msgspec.DecodeError:
            return None


class _ReadRequest(Request):
    """A request whose body was read; `value` is None if it is not the JSON that `foreign_json` reads."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes, self._value = body, value

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        if self._value is not None:
            return self._value
        if len(self._bytes) > LARGE_BYTES:
            raise json.JSONDecodeError("no JSON in UTF-8", "", 0)
        return json.loads(self._bytes)  # it reads NaN and the like, which the fields of bodies refuse by name
