"""Fake engines in their own processes, which a test may suspend, and links to them that a test may cut.

`python -m tests.support.gateway.engine_processes PORT TOKENIZER PACE_S TOKENS` runs one of them.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from tokenizers import Tokenizer

from gateway.engines.cancellation import cancel_and_wait
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.serving import free_port
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
STARTS_WITHIN_S = 300.0


@dataclass
class EngineProcess:
    """One fake engine. All of them give the same answer."""

    process: subprocess.Popen[bytes]
    url: str

    def suspend(self) -> None:
        """Make the process hang. The kernel still accepts connections and bytes for it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def hang_scheduler(self) -> None:
        """Let the engine send no tokens and answer no `/server_info`. It still answers other requests."""
        httpx.get(f"{self.url}/hang", timeout=120).raise_for_status()

    def resume_scheduler(self) -> None:
        httpx.get(f"{self.url}/go_on", timeout=120).raise_for_status()

    def aborted(self) -> list[str]:
        rids: list[str] = httpx.get(f"{self.url}/aborted", timeout=120).json()
        return rids

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/model_info", timeout=120).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def engine_process(tokenizer: Path, pace_s: float, tokens: int) -> Iterator[EngineProcess]:
    """An engine that takes `pace_s` for each of the `tokens` tokens of its answer."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.gateway.engine_processes", str(port), str(tokenizer)]
    process = subprocess.Popen([*command, str(pace_s), str(tokens)], cwd=ROOT)
    try:
        engine = EngineProcess(process, f"http://127.0.0.1:{port}")
        wait_until(engine.answers, STARTS_WITHIN_S)
        yield engine
    finally:
        process.kill()
        process.wait()


class Link:
    """A TCP proxy before one address. While it is cut, it forwards nothing and keeps every connection.

    A network that drops packets does the same: what was sent meanwhile arrives after it is mended.
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


def main() -> None:
    port, tokenizer, pace_s, tokens = sys.argv[1:]
    engine = FakeEngine(
        Tokenizer.from_file(tokenizer), mind=[10 + n % 50 for n in range(int(tokens))], pace_s=float(pace_s)
    )

    works = asyncio.Event()
    works.set()

    async def aborted(_: Request) -> Response:
        return JSONResponse(engine.aborted)

    async def hang(_: Request) -> Response:
        works.clear()
        return JSONResponse({})

    async def go_on(_: Request) -> Response:
        works.set()
        return JSONResponse({})

    async def server_info(_: Request) -> Response:
        return JSONResponse({"internal_states": []})

    app = engine.app()
    for handler in (aborted, hang, go_on, server_info):
        app.router.routes.append(Route(f"/{handler.__name__}", handler))

    async def scheduled(scope: Scope, receive: Receive, send: Send) -> None:
        """The engine's application. Tokens and answers to `/server_info` wait while the scheduler hangs."""

        async def send_when_it_works(message: Message) -> None:
            await works.wait()
            await send(message)

        by_scheduler = scope.get("path") in ("/generate", "/server_info")
        await app(scope, receive, send_when_it_works if by_scheduler else send)

    uvicorn.run(scheduled, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
