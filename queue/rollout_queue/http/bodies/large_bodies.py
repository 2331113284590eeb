"""Large bodies are received in small pieces; long work is done in a thread, one by one; owners take turns.

So other requests go on in between, however many bodies come at once, and whatever is in them.
"""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.types import Message, Receive

from rollout_queue.http.bodies.fair_turns import FairTurns

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
