"""The requests to load a version that run now. Each can be ended until the engine pauses.

POST /reload ──▶ newest push? ──▶ run ──▶ prepare ─▶ load ─▶ answer
DELETE /reload/{version} ─────────────▶ abort ┘ (not while it loads)
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_server.errors import PushReplaced, ReloadAborted

T = TypeVar("T")


class ReloadRequests:
    """The running requests, by version, and the newest push that the server has seen."""

    def __init__(self, loading: Callable[[], int | None]) -> None:
        """`loading` returns the version that the engine loads now: that cannot be ended."""
        self._loading = loading
        self._running: dict[asyncio.Task[Any], int] = {}
        self._aborted: set[asyncio.Task[Any]] = set()
        self._newest_push = 0
        self._proved: tuple[int, int] | None = None

    @property
    def versions(self) -> frozenset[int]:
        """The versions that requests load or prepare now."""
        return frozenset(self._running.values())

    def proved(self, version: int, push: int | None) -> None:
        """The engine serves the version, as this push asked for; None is an operator's request."""
        self._proved = None if push is None else (version, push)

    def push_of(self, version: int) -> int | None:
        """The push that has brought the version, which is served now; None if none has."""
        return None if self._proved is None or self._proved[0] != version else self._proved[1]

    async def begin(self, push: int | None, *, force: bool) -> None:
        """A gateway has sent a request of this push; an operator's has none. A newer push with `force` ends
        the requests of older ones.

        Raises PushReplaced for an older push: its gateway hung while another one began the newer push.
        """
        if push is None:
            return
        if push < self._newest_push:
            raise PushReplaced(f"push {push} is older than push {self._newest_push}")
        newer, self._newest_push = push > self._newest_push, push
        if newer and force:
            for version in self.versions:
                await self.abort(version)

    async def run(self, version: int, work: Coroutine[Any, Any, T]) -> T:
        """Do the work. Raises ReloadAborted if `abort` ends it."""
        task = asyncio.create_task(work)
        self._running[task] = version
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._aborted:
                raise ReloadAborted(f"the reload of version {version} was ended") from None
            raise
        finally:
            self._running.pop(task, None)
            self._aborted.discard(task)

    async def abort(self, version: int) -> bool:
        """End the requests for this version, except one that the engine is loading. Returns whether there was
        one."""
        if self._loading() == version:
            return False
        tasks = [task for task, of in self._running.items() if of == version]
        self._aborted.update(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return any(task.cancelled() for task in tasks)
