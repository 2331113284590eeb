"""An event loop whose time passes at once when nothing is left to do."""

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_queue import clock

EPOCH_S = 1.7e9


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once when nothing is left to do."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Waits(self))

    def time(self) -> float:
        return self.now


class _Waits(selectors.DefaultSelector):
    """Waits for a timeout by moving the clock."""

    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.now += timeout or 0.0
        return super().select(0)


class VirtualClock(clock.Clock):
    """The time of the loop, also as the time since 1970."""

    def __init__(self, loop: VirtualTime) -> None:
        self.monotonic, self.now = loop.time, lambda: EPOCH_S + loop.time()


@contextmanager
def virtual_clocks() -> Iterator[VirtualTime]:
    """A loop, and its time for all that reads it in this context."""
    loop = VirtualTime()
    with clock.using(VirtualClock(loop)):
        try:
            yield loop
        finally:
            loop.close()
