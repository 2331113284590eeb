"""Links to servers that a test may cut."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gateway.cancellation import cancel_and_wait


class Link:
    """A TCP proxy before one address. While it is cut, it forwards nothing and keeps every connection.

    A network that drops packets does the same, as does a server that hangs: what was sent meanwhile arrives
    after the link is mended.
    """

    def __init__(self, url: str) -> None:
        self.lead_to(url)
        self._loop = asyncio.new_event_loop()
        self._to, self._back = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = f"http://127.0.0.1:{self._loop.run_until_complete(self._listen())}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def lead_to(self, url: str) -> None:
        """From now on, new connections lead to this address."""
        host, port = url.split("//")[-1].split(":")
        self._target = host, int(port)

    def cut(self, *, to: bool = True, back: bool = True) -> None:
        """Forward nothing more to the address, nothing back from it, or neither."""
        for way, cut in ((self._to, to), (self._back, back)):
            if cut:
                self._loop.call_soon_threadsafe(way.clear)

    def mend(self) -> None:
        for way in (self._to, self._back):
            self._loop.call_soon_threadsafe(way.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.run_until_complete(cancel_and_wait(list(self._tasks)))
        self._loop.close()

    async def _listen(self) -> int:
        self._to.set()
        self._back.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:  # nobody listens there
            writer.close()
            return
        ways = (
            self._forward(reader, there_writer, self._to),
            self._forward(there_reader, writer, self._back),
        )
        for each in ways:
            task = asyncio.create_task(each)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                await whole.wait()
                writer.write(data)
                await writer.drain()
            await whole.wait()
        writer.close()


@contextmanager
def link(url: str) -> Iterator[Link]:
    made = Link(url)
    try:
        yield made
    finally:
        made.close()
