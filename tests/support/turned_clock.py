"""A clock that a test turns forward."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from rollout_queue.clock import Clock, Timer
from tests.support.waiting import wait_until

T = TypeVar("T")


@dataclass(eq=False)
class _Turnable:
    """A callback that is due at a time of the turned clock."""

    clock: "TurnedClock"
    due: float
    loop: asyncio.AbstractEventLoop
    callback: Callable[[], object]
    handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Runs in the loop, at the beginning and after each turn."""
        if self in self.clock.timers:
            if self.handle is not None:
                self.handle.cancel()
            left_s = max(0.0, self.due - self.clock.monotonic())
            if not left_s or not self.clock.stopped:
                self.handle = self.loop.call_later(left_s, self._fire)

    def _fire(self) -> None:
        if self in self.clock.timers:
            self.clock.timers.discard(self)
            self.callback()

    def cancel(self) -> None:
        self.clock.timers.discard(self)
        if self.handle is not None:
            self.handle.cancel()


class TurnedClock(Clock):
    """Services in several event loops and threads may share one.

    Between two turns, time passes as on the machine, unless the clock is `stopped`.
    """

    def __init__(self, *, stopped: bool = False) -> None:
        self.stopped = stopped
        self._began = super().now(), super().monotonic()
        self._turned_s = 0.0
        self._moved = threading.Condition()
        self.timers: set[_Turnable] = set()

    def turn(self, seconds: float) -> None:
        """Let so much time pass at once. What waits for a moment that has come goes on."""
        with self._moved:
            self._turned_s += seconds
            self._moved.notify_all()
        for timer in list(self.timers):
            try:
                timer.loop.call_soon_threadsafe(timer.arm)
            except RuntimeError:  # its loop has ended
                self.timers.discard(timer)

    def turn_until(self, ask: Callable[[], T], step_s: float) -> T:
        """Turn in steps until the answer is truthy, and return it. After each step, sockets and threads have
        a little of the real time that they need."""

        def turned() -> T:
            self.turn(step_s)
            return ask()

        return wait_until(turned)

    def now(self) -> float:
        return (self._began[0] if self.stopped else super().now()) + self._turned_s

    def monotonic(self) -> float:
        return (self._began[1] if self.stopped else super().monotonic()) + self._turned_s

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = _Turnable(self, self.monotonic() + seconds, asyncio.get_running_loop(), callback)
        self.timers.add(timer)
        timer.arm()
        return timer

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)  # as the machine's clock does
            return
        over = asyncio.Event()
        timer = self.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:
            if seconds is None:
                yield limit
                return
            end = self.call_later(seconds, lambda: limit.reschedule(loop.time()))
            try:
                yield limit
            finally:
                end.cancel()

    def pause(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if seconds is None:
            return event.wait()
        until = self.monotonic() + seconds
        while not event.is_set() and (left_s := until - self.monotonic()) > 0:
            with self._moved:
                self._moved.wait(min(left_s, 0.01))  # the event does not notify this condition
        return event.is_set()
