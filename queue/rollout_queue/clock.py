"""The clock: the one place that reads time and waits for it, so that a test can turn time forward.

    product code ──now · monotonic · sleep · timeout · wait_tasks · call_later · pause · wait──▶ `Clock`

The current clock is a context variable. Tasks inherit it, and so do functions that `asyncio.to_thread` runs.
A thread that is started in another way has the machine's clock, unless it runs in a copy of the context.
Whoever builds a service hands in another clock with `using`.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """The machine's clock. All durations are in seconds."""

    def now(self) -> float:
        """Seconds since 1970. It may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment. It never goes back."""
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call back in the running event loop."""
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """A context that raises TimeoutError after `seconds`, as `asyncio.timeout` does."""
        return asyncio.timeout(seconds)

    def pause(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Block this thread until the event is set, or the seconds have passed. Returns whether it is set."""
        return event.wait(seconds)


_current: ContextVar[Clock] = ContextVar("clock", default=Clock())  # noqa: B039 - it has no state


@contextmanager
def using(clock: Clock) -> Iterator[None]:
    """Hand in a clock: the block, and the tasks that it starts, have this one."""
    before = _current.set(clock)
    try:
        yield
    finally:
        _current.reset(before)


def now() -> float:
    return _current.get().now()


def monotonic() -> float:
    return _current.get().monotonic()


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    return _current.get().call_later(seconds, callback)


async def sleep(seconds: float) -> None:
    await _current.get().sleep(seconds)


def timeout(seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    return _current.get().timeout(seconds)


async def wait_tasks(
    tasks: Collection[asyncio.Future[Any]],
    seconds: float,
    return_when: str = asyncio.ALL_COMPLETED,
) -> None:
    """`asyncio.wait` for at most so many seconds. No task is cancelled, and no TimeoutError is raised."""
    with suppress(TimeoutError):
        async with timeout(seconds):
            await asyncio.wait(tasks, return_when=return_when)


def pause(seconds: float) -> None:
    _current.get().pause(seconds)


def wait(event: threading.Event, seconds: float | None) -> bool:
    return _current.get().wait(event, seconds)
