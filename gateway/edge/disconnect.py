"""Stops a call whose client has disconnected, so that no engine samples an answer that no client reads."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from rollout_queue import clock

WATCH_AFTER_S = 0.5
"""Most calls end sooner. Only longer calls start the task that watches the connection."""


class DisconnectWatch:
    """`with DisconnectWatch(receive) as client:` cancels the block when the client disconnects.

    The `with` statement swallows this cancellation.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        """Runs the block; None outside of it."""
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False
        self._error: Exception | None = None
        self._on_disconnect: Callable[[], None] | None = None

    def __enter__(self) -> "DisconnectWatch":
        self._task = asyncio.current_task()
        self._timer = clock.call_later(WATCH_AFTER_S, self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        # Without these, nothing of a call refers to itself: its memory need not wait for the collector.
        task, self._task, self._on_disconnect = self._task, None, None
        if not self._stopped or task is None or task.uncancel() or kind is not asyncio.CancelledError:
            return False
        if self._error is not None:
            raise self._error from error
        return True

    @property
    def watched(self) -> bool:
        """Whether the task that watches the connection has started."""
        return self._watching is not None

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` in place of `stop` when the client disconnects. It may call `stop` later."""
        self._on_disconnect = callback

    def stop(self, error: Exception | None = None) -> None:
        """Cancel the `with` block. The `with` statement then raises the error, if one is given."""
        if not self._stopped and self._task is not None:
            self._stopped, self._error = True, error
            self._task.cancel()

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._until_disconnect())

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        (self._on_disconnect or self.stop)()
