"""Writes an answer to the client that made the call, at this client's pace unless others read it, too.

sampling ──message──▶ first client           alone: the sampling waits until the socket takes the message
            └─────────▶ unsent ──task──▶ first client     a retry reads as well: nobody waits for this socket
"""

import asyncio
from collections import deque

from starlette.types import Message, Send


class FirstClient:
    """The client that made a call, and what is still to be sent to it once others read the answer, too."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gone = self._complete = False
        self._sending: dict[asyncio.Task[object], int] = {}
        """The tasks that wait for the client's socket, and how often each had been cancelled before."""
        self._freed: set[asyncio.Task[object]] = set()
        self._unsent: deque[Message] = deque()
        self._more = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        if self._gone:
            return
        if self._writing is not None:
            self._later(message)
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a call is always served by a task
        self._sending[task] = task.cancelling()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            # As in asyncio.timeout: if others cancelled the task as well, it stays cancelled.
            if task not in self._freed or task.uncancel() > self._sending[task]:
                raise
            self._later(message)  # the server waits for the socket before it takes a message
        finally:
            del self._sending[task]

    def free(self) -> None:
        """From now on nobody waits for this client. What it has not taken is kept until the call ends."""
        if self._writing is None and not (self._gone or self._complete):
            self._writing = asyncio.create_task(self._write())
            self._freed.update(self._sending)
            for task in self._sending:
                task.cancel()

    def leave(self) -> None:
        """The client has left."""
        self._gone = True
        self._unsent.clear()
        if self._writing is not None:
            self._writing.cancel()

    async def flush(self) -> None:
        """The others have the answer: return when this client has all of it, and wait for it from now on."""
        if self._writing is None:
            return
        writing, self._complete = self._writing, True
        self._more.set()
        try:
            await asyncio.wait([writing])
        finally:
            writing.cancel()
            self._writing = None

    def _later(self, message: Message) -> None:
        self._unsent.append(message)
        self._more.set()

    async def _write(self) -> None:
        while True:
            while self._unsent:
                await self._send(self._unsent.popleft())
            if self._complete:
                return
            self._more.clear()
            await self._more.wait()
