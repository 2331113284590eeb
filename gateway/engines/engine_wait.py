"""A call's wait for bytes of its engine, which the fleet can end when it finds the engine silent or dead."""

import asyncio
from types import TracebackType

from gateway.engines.answer import PartialAnswer
from gateway.engines.placement.choice import Wish
from gateway.errors import EngineFault


class EngineWait:
    """`with wait:` around each await of one engine's bytes, in the task that made the object.

    `end` makes the block raise the fault. Between two blocks, `end` has no effect until the next one begins.
    So it never interrupts the delivery of tokens that have arrived.
    """

    def __init__(self, answer: PartialAnswer) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a call is always served by a task
        self._task = task
        self._answer = answer
        self._waiting = self._cancelled = False
        self._cancelling = task.cancelling()
        self._fault: EngineFault | None = None

    @property
    def wish(self) -> Wish:
        """Which policy versions may continue the answer."""
        return self._answer.wish

    @property
    def movable(self) -> bool:
        """Whether another engine can continue the answer."""
        return self._answer.resumable

    def end(self, fault: EngineFault) -> None:
        """Give the engine up."""
        if self._fault is None:
            self._fault = fault
            if self._waiting:
                self._cancelled = self._task.cancel()

    def __enter__(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._waiting = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting = False
        if not self._cancelled:
            return
        self._cancelled = False
        # As in asyncio.timeout: if others cancelled the task as well, it stays cancelled.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError and self._fault:
            raise self._fault from error
