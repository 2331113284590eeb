"""The HTTP client for engines uses connections again that are not stale, and bounds its buffers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.engine_client import EngineClient
from gateway.fleet.engine_connection import ConnectFailed, ConnectionLost, EngineConnections, ReadTimedOut
from tests.support.serving import free_port
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Peer:
    """A server that answers every request on a connection with given bytes."""

    answer: bytes = OK
    after: Answer | None = None
    url: str = ""
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    ended: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released once for each connection that the client closes."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.heads.append(head)
                lengths = (line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(next(lengths, b"content-length: 0").split()[1]))
                writer.write(self.answer)
                if self.after is not None:
                    await self.after(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.ended.release()

    @asynccontextmanager
    async def there(self, within_s: float = PATIENCE_S, **limits: Any) -> AsyncIterator[EngineConnections]:
        http = EngineConnections(within_s, **limits)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with asyncio.timeout(300):
                yield http
        finally:
            await http.close()
            server.close()


async def whole(http: EngineConnections, url: str) -> tuple[int, bytes]:
    response = await http.post(url, "/generate", b"{}")
    body, status = b"", response.status
    while data := await response.read():
        body += data
    response.release()
    return status, body


async def test_a_connection_is_used_again() -> None:
    peer = Peer()
    async with peer.there() as http:
        for _ in range(3):
            assert await whole(http, peer.url) == (200, b"ok")
        assert peer.connections == 1
        assert peer.heads[0].startswith(b"post /generate http/1.1\r\nhost: 127.0.0.1:")
        assert await whole(http, f"{peer.url}/engines/7/") == (200, b"ok")
        assert peer.heads[-1].startswith(b"post /engines/7/generate http/1.1\r\n")


async def test_the_kernel_checks_that_the_other_end_of_a_connection_is_there() -> None:
    async def answer_late(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    peer = Peer(OK[:-1], answer_late)
    async with peer.there() as http:
        response = await http.post(peer.url, "/generate", b"{}")
        assert kernel_timer(int(peer.url.rpartition(":")[2])) == KEEP_ALIVE_TIMER
        response.release()


KEEP_ALIVE_TIMER = "02"


def kernel_timer(peer_port: int) -> str:
    """The number that Linux gives to the timer that runs for the connection to a port."""
    entries = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    (timer,) = [entry[5] for entry in entries if entry[2].endswith(f":{peer_port:04X}") and entry[3] == "01"]
    return timer.partition(":")[0]


async def end(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


@pytest.mark.parametrize(
    ("answer", "after", "limits"),
    [
        pytest.param(OK, None, {"idle_limit_s": -1.0}, id="it was idle too long"),
        pytest.param(OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), None, {}, id="it will be closed"),
        pytest.param(OK.replace(b"1.1", b"1.0"), None, {}, id="it is of HTTP/1.0"),
        pytest.param(OK, end, {}, id="it was closed"),
    ],
)
async def test_which_connections_are_not_used_again(
    answer: bytes, after: Answer | None, limits: dict[str, Any]
) -> None:
    peer = Peer(answer, after)
    async with peer.there(**limits) as http:
        for _ in range(3):
            assert await whole(http, peer.url) == (200, b"ok")
            if not limits:
                await peer.ended.acquire()
        assert peer.connections == 3


async def test_a_connection_with_surplus_bytes_is_not_used_again() -> None:
    peer = Peer(OK + b"more than was asked for")
    async with peer.there() as http:
        for _ in range(2):
            assert (await whole(http, peer.url))[0] == 200
            await peer.ended.acquire()
        assert peer.connections == 2


async def left_after_one_byte(http: EngineConnections, peer: Peer) -> None:
    response = await http.post(peer.url, "/generate", b"{}")
    assert await response.read() == b"o"
    response.leave()


async def test_a_connection_that_is_left_early_is_used_again_once_the_last_byte_came() -> None:
    left = asyncio.Event()

    async def end_once_left(writer: asyncio.StreamWriter) -> None:
        await left.wait()
        left.clear()
        writer.write(b"k")

    peer = Peer(OK[:-1], after=end_once_left)
    async with peer.there() as http:
        # An answer's last byte may come late, but not each of a hundred times.
        while peer.connections == len(peer.heads) < 100:
            await left_after_one_byte(http, peer)
            left.set()
        assert peer.connections < len(peer.heads), "no connection was used again"


async def test_a_connection_that_is_left_and_whose_answer_never_ends_is_closed() -> None:
    peer = Peer(OK[:-1])
    async with peer.there(within_s=20, last_bytes_s=0.1) as http:
        for _ in range(2):
            await left_after_one_byte(http, peer)
            await peer.ended.acquire()
        assert peer.connections == 2


async def test_an_engine_gets_the_headers_for_engines_and_a_rollout_server_its_own() -> None:
    peer = Peer()
    async with peer.there():
        client = EngineClient(5.0, {"key": "of-engines"})
        await client.get(f"{peer.url}/model_info", PATIENCE_S)
        await client.get(f"{peer.url}/status", PATIENCE_S, {"key": "of-servers"})
        await client.close()
    keys = [[line for line in head.split(b"\r\n") if line.startswith(b"key:")] for head in peer.heads]
    assert keys == [[b"key: of-engines"], [b"key: of-servers"]]


async def test_an_interim_response_is_not_taken_for_the_answer() -> None:
    peer = Peer(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno")
    async with peer.there() as http:
        assert await whole(http, peer.url) == (503, b"no")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200", "closed"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", "closed"),
    ],
)
async def test_a_connection_that_ends_too_soon_is_lost(answer: bytes, why: str) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        await writer.drain()
        writer.close()

    peer = Peer(answer, after=close)
    async with peer.there() as http:
        with pytest.raises(ConnectionLost, match=why):
            await whole(http, peer.url)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"])
async def test_silence_is_noticed(answer: bytes) -> None:
    peer = Peer(answer)
    async with peer.there(0.2) as http:
        with pytest.raises(ReadTimedOut):
            await whole(http, peer.url)


async def test_each_request_on_a_connection_has_its_own_timeout(turned: TurnedClock) -> None:
    read_timeout_s = 2.0  # long enough that a busy machine's delay does not matter

    async def answer_late(writer: asyncio.StreamWriter) -> None:
        turned.turn(0.6 * read_timeout_s)  # two such pauses take longer than one timeout
        writer.write(OK)

    async def never_answer(_: asyncio.StreamWriter) -> None:
        turned.turn(read_timeout_s)

    peer = Peer(b"", after=answer_late)
    async with peer.there(read_timeout_s) as http:
        for _ in range(3):
            assert await whole(http, peer.url) == (200, b"ok")
        assert peer.connections == 1
        peer.after = never_answer
        with pytest.raises(ReadTimedOut):
            await whole(http, peer.url)


async def test_a_refused_connection_is_reported_at_once() -> None:
    http = EngineConnections(PATIENCE_S)
    with pytest.raises(ConnectFailed):
        await http.post(f"http://127.0.0.1:{free_port()}", "/generate", b"{}")
    await http.close()


async def test_a_slow_reader_makes_the_engine_wait_and_misses_nothing(turned: TurnedClock) -> None:
    size, written = 64 * 2**20, 0
    piece = bytes(2**16)

    async def write(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while written < size:
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    peer = Peer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, after=write)
    # The timeout is long, because a busy machine may write nothing for some time.
    async with peer.there(within_s=8.0) as http:
        response = await http.post(peer.url, "/generate", b"{}")
        before = -1
        while before < written:
            before = written
            await asyncio.sleep(0.3)  # until no more is written; no event tells that
        turned.turn(8.3)  # longer than the timeout, which must not count the reader's own pauses
        assert written < 32 * 2**20, "more was written than sockets and bounded buffers hold"
        total = 0
        while data := await response.read():
            total += len(data)
        assert total == size
        response.release()
