"""The line to an engine: connections are used again, never a stale one, and nothing piles up unread."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway.engines import http as engine_http
from gateway.engines.http import ConnectFailed, ConnectionLost, EngineHttp, Silence
from tests.support.serving import free_port

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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split()[1]))
                writer.write(self.answer)
                if self.after is not None:
                    await self.after(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def there(self, silence_s: float = 0.2) -> AsyncIterator[EngineHttp]:
        http = EngineHttp(connect_s=2.0, silence_s=silence_s)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield http
        finally:
            http.close()
            server.close()


async def whole(http: EngineHttp, url: str) -> tuple[int, bytes]:
    line = await http.post(url, "/generate", b"{}")
    body = b""
    while data := await line.read():
        body += data
    line.release()
    return line.status, body


async def test_a_connection_is_used_again() -> None:
    peer = Peer()
    async with peer.there() as http:
        for _ in range(3):
            assert await whole(http, peer.url) == (200, b"ok")
        assert peer.connections == 1
        assert peer.heads[0].startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert await whole(http, f"{peer.url}/engines/7/") == (200, b"ok")
        assert peer.heads[-1].startswith(b"POST /engines/7/generate HTTP/1.1\r\n")


async def test_one_that_was_idle_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "IDLE_LIMIT_S", -1.0)
    peer = Peer()
    async with peer.there() as http:
        for _ in range(3):
            await whole(http, peer.url)
        assert peer.connections == 3


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"more than was asked for",
    ],
)
async def test_one_that_is_not_to_be_kept_is_not(answer: bytes) -> None:
    peer = Peer(answer)
    async with peer.there() as http:
        for _ in range(2):
            assert (await whole(http, peer.url))[0] == 200
            await asyncio.sleep(0.02)
        assert peer.connections == 2


async def test_one_that_closed_meanwhile_is_not() -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        writer.close()

    peer = Peer(after=close)
    async with peer.there() as http:
        for _ in range(3):
            assert await whole(http, peer.url) == (200, b"ok")
            await asyncio.sleep(0.02)
        assert peer.connections == 3


@pytest.mark.parametrize("rest", [b"k", b""])
async def test_one_that_is_left_before_the_last_byte_is_used_again_when_that_came(
    monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(engine_http, "LAST_BYTES_S", 0.4)

    async def tarry(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(rest)

    peer = Peer(OK[:-1], after=tarry)
    async with peer.there() as http:
        for _ in range(2):
            line = await http.post(peer.url, "/generate", b"{}")
            assert await line.read() == b"o"
            line.leave()
            await asyncio.sleep(0.8)
        assert peer.connections == (1 if rest else 2)


async def test_an_announcement_before_the_answer_is_none() -> None:
    peer = Peer(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno")
    async with peer.there() as http:
        assert await whole(http, peer.url) == (503, b"no")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
    ],
)
async def test_a_connection_that_ends_too_soon_is_lost(answer: bytes) -> None:
    async def close(writer: asyncio.StreamWriter) -> None:
        await writer.drain()
        writer.close()

    peer = Peer(answer, after=close)
    async with peer.there() as http:
        with pytest.raises(ConnectionLost):
            await whole(http, peer.url)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"])
async def test_silence_is_noticed(answer: bytes) -> None:
    peer = Peer(answer)
    async with peer.there() as http:
        with pytest.raises(Silence):
            await whole(http, peer.url)


async def test_each_request_on_a_connection_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "LAST_BYTES_S", 0.1)
    tarry = asyncio.Event()

    async def answer_late(writer: asyncio.StreamWriter) -> None:
        await tarry.wait()
        writer.write(OK)

    peer = Peer()
    async with peer.there() as http, asyncio.timeout(20):
        line = await http.post(peer.url, "/generate", b"{}")
        while await line.read():
            pass
        peer.answer, peer.after = b"", answer_late
        asyncio.get_running_loop().call_later(0.5, tarry.set)
        await line.send(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n", b"{}", 30.0)
        assert line.status == 200
        while await line.read():
            pass
        tarry.clear()
        with pytest.raises(Silence, match=r"0\.2 s"):
            await line.send(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n", b"{}", 0.2)
        line.drop()
        tarry.set()


async def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(ConnectFailed):
        await EngineHttp(2.0, 0.2).post(f"http://127.0.0.1:{free_port()}", "/generate", b"{}")


async def test_a_reader_that_is_behind_makes_the_engine_wait_and_misses_nothing() -> None:
    size, written = 64 * 2**20, 0
    piece = bytes(2**16)

    async def write(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while written < size:
            writer.write(piece)
            await writer.drain()
            written += len(piece)

    peer = Peer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, after=write)
    async with peer.there(silence_s=2.0) as http:  # a busy machine may write nothing for a part of a second
        line = await http.post(peer.url, "/generate", b"{}")
        await asyncio.sleep(2.5)  # longer than silence would be: the reader is at fault
        assert written < 32 * 2**20, "what lies in sockets and buffers, no more"
        total = 0
        while data := await line.read():
            total += len(data)
        assert total == size
        line.release()
