"""The clock: the one place that reads time and waits for it, so that a test can turn time forward.

    product code ──now · monotonic · sleep · timeout · wait_tasks · call_later · deadline · pause──▶ `Clock`

The current clock is a context variable. Tasks inherit it, and so do functions that `asyncio.to_thread` runs.
A thread that is started in another way has the machine's clock, unless it runs in a copy of the context.
Whoever builds a service hands in another clock with `using`.

A process may stand still: it is suspended, or gets no CPU. It reads nothing meanwhile, so that time counts in
no `timeout` and no `deadline`. What has arrived is read before either is over.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

TICK_S = 0.25
"""How often an event loop notes whether it has stood still."""
LAST_LOOK_S = 0.02
"""How long a loop reads what has arrived before a deadline is over."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class _Standstill:
    """How long one event loop has not run although it should have, while somebody has a deadline there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._total_s, self._looked_at, self._users = loop, 0.0, loop.time(), 0
        self._ticks = False

    def seconds(self) -> float:
        now = self.loop.time()
        if (late_s := now - self._looked_at - TICK_S) > 0:
            self._total_s += late_s
        self._looked_at = now
        return self._total_s

    def enter(self) -> float:
        """Returns the seconds until now."""
        self._users += 1
        if not self._ticks:
            self._ticks, self._looked_at = True, self.loop.time()
            self.loop.call_later(TICK_S, self._tick)
        return self.seconds()

    def leave(self) -> None:
        self._users -= 1

    def _tick(self) -> None:
        self.seconds()
        self._ticks = self._users > 0
        if self._ticks:
            self.loop.call_later(TICK_S, self._tick)


_standstills: WeakKeyDictionary[asyncio.AbstractEventLoop, _Standstill] = WeakKeyDictionary()


def _standstill_of(loop: asyncio.AbstractEventLoop) -> _Standstill:
    if (found := _standstills.get(loop)) is None:
        found = _standstills[loop] = _Standstill(loop)
    return found


class _Deadline:
    """Calls back after some seconds in which the loop of the caller ran."""

    def __init__(self, clock: "Clock", seconds: float, callback: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()
        self._clock, self._callback, self._over = clock, callback, False
        self._still = _standstill_of(loop)
        self._due = clock.monotonic() + seconds - self._still.enter()
        self._timer: Timer = clock.call_later(seconds, self._check)

    def _check(self) -> None:
        left_s = self._due + self._still.seconds() - self._clock.monotonic()
        if left_s > 0:
            self._timer = self._clock.call_later(left_s, self._check)
        else:
            self._timer = self._still.loop.call_later(LAST_LOOK_S, self._fire)

    def _fire(self) -> None:
        self.cancel()
        self._callback()

    def cancel(self) -> None:
        self._timer.cancel()
        if not self._over:
            self._over = True
            self._still.leave()


class _Timeout:
    """`asyncio.timeout`, whose end is a deadline."""

    def __init__(self, clock: "Clock", seconds: float) -> None:
        self._clock, self._seconds, self._limit = clock, seconds, asyncio.timeout(None)

    async def __aenter__(self) -> asyncio.Timeout:
        self._timer = self._clock.deadline(self._seconds, self._end)
        return await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        del self._timer  # it refers to this: memory of a call would wait for the garbage collector
        await self._limit.__aexit__(kind, error, trace)

    def _end(self) -> None:
        if self._limit.when() is None:  # else the caller has chosen another moment
            self._limit.reschedule(asyncio.get_running_loop().time())


class Clock:
    """The machine's clock. All durations are in seconds."""

    now: Callable[[], float] = staticmethod(time.time)
    """Seconds since 1970. It may jump."""
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds since some moment. It never goes back."""

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Call back in the running event loop."""
        return asyncio.get_running_loop().call_later(seconds, callback)

    def deadline(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """`call_later` for what somebody else has to do until then."""
        return _Deadline(self, seconds, callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """A context that raises TimeoutError after `seconds`, as `asyncio.timeout` does."""
        return asyncio.timeout(seconds) if seconds is None or seconds <= 0 else _Timeout(self, seconds)

    def pause(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Block this thread until the event is set, or the seconds have passed. Returns whether it is set."""
        return event.wait(seconds)


_machine = Clock()
_current: ContextVar[Clock] = ContextVar("clock", default=_machine)


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


def standstill_s() -> float:
    """For how long the running loop has stood still, as far as that was noticed. Only differences matter."""
    return _standstill_of(asyncio.get_running_loop()).seconds()


def deadline(seconds: float, callback: Callable[[], object]) -> Timer:
    return _current.get().deadline(seconds, callback)


async def sleep(seconds: float) -> None:
    await _current.get().sleep(seconds)


def timeout(seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    return _current.get().timeout(seconds)


def real_timeout(seconds: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """`timeout` on the machine's clock, for an answer of another process: it takes real time, so a turn of a
    test's clock would find it overdue."""
    return _machine.timeout(seconds)


async def wait_tasks(
    tasks: Collection[asyncio.Future[Any]],
    seconds: float,
    return_when: str = asyncio.ALL_COMPLETED,
) -> None:
    """`asyncio.wait` for at most so many seconds. No task is cancelled, and no TimeoutError is raised."""
    with suppress(TimeoutError):
        async with timeout(seconds):
            await asyncio.wait(tasks, return_when=return_when)


def backoff_s(attempt: int, first_s: float, longest_s: float) -> float:
    """The seconds before the next attempt, after `attempt` others: doubled each time, up to `longest_s`. It
    is shortened at random by up to a half, so that many that fail at once do not come back at once."""
    return min(first_s * 2.0 ** min(attempt, 60), longest_s) * random.uniform(0.5, 1.0)


def pause(seconds: float) -> None:
    _current.get().pause(seconds)


def wait(event: threading.Event, seconds: float | None) -> bool:
    return _current.get().wait(event, seconds)
