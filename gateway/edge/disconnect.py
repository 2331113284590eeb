"""Is the client still there? A call whose client has gone is stopped: no engine works for nobody."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

LOOK_AFTER_S = 0.5
"""Most calls are over before anybody has to look; those that are not pay for one task."""


class Attention:
    """`with Attention(receive) as client:` stops the body when the client hangs up, and ends quietly."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False
        self._gone: Callable[[], None] = self.stop

    def __enter__(self) -> "Attention":
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a request is always served by a task
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._stopped and self._task.uncancel() == 0:
            return kind is not None and issubclass(kind, asyncio.CancelledError)
        return False

    @property
    def watched(self) -> bool:
        """Somebody looks whether the client is there."""
        return self._watching is not None

    def when_gone(self, gone: Callable[[], None]) -> None:
        """Leave it to `gone` what is to happen when the client hangs up; it may `stop` later."""
        self._gone = gone

    def stop(self) -> None:
        self._stopped = True
        self._task.cancel()

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone()
