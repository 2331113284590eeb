"""Hostile calls. `WAYS` names each kind of them, and the statuses with which the gateway may answer it."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import closing, suppress
from urllib.parse import urlsplit

import httpx

from tests.soak.engine import DEADLY_TOKENS, LONG_TOKENS
from tests.soak.journal import Journal
from tests.support.gateway.running import CLIENT_KEY

PATIENCE_S = 60.0
CHAT_PATH, PATHS = "/v1/chat/completions", ("/v1/chat/completions", "/v1/messages", "/v1/responses")
HI = {"messages": [{"role": "user", "content": "hi"}]}
MIB = 2**20
NO_REPLY = None
DEADLY = "deadly"
Way = Callable[[str, random.Random], Awaitable[int | None]]


class Hostile:
    """Makes hostile calls, each of a kind that is drawn at random."""

    def __init__(self, draw: random.Random, journal: Journal) -> None:
        self._draw, self._journal = draw, journal

    async def call(self, gateway: str, name: str | None = None) -> None:
        """`name` is one of `WAYS`; by default, one of those that harm nobody else is drawn."""
        name = name or self._draw.choice([each for each in WAYS if each != DEADLY])
        way, expected = WAYS[name]
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                status = await way(gateway, self._draw)
        except (OSError, TimeoutError, EOFError) as error:
            self._journal.surprised(f"{name}: {type(error).__name__}: {error}")
            return
        self._journal.called(name, status, time.monotonic() - began)
        if status not in expected:
            self._journal.surprised(f"{name}: {status} in place of {expected}")


def head(path: str, size: int, key: str | None = CLIENT_KEY, attempt: int = 0) -> bytes:
    given = f"authorization: Bearer {key}\r\n" if key else ""
    given += f"x-stainless-retry-count: {attempt}\r\n"
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n{given}"
        f"content-length: {size}\r\n\r\n"
    ).encode()


async def said(gateway: str, data: bytes) -> int:
    """Send the bytes; return the status of the reply."""
    with closing(await connected(gateway)) as line:
        loop = asyncio.get_running_loop()
        with suppress(BrokenPipeError, ConnectionResetError):  # the gateway may answer before it has read all
            await loop.sock_sendall(line, data)
        return await status_of(line)


async def status_of(line: socket.socket) -> int:
    heard = b""
    while b"\r\n" not in heard:
        data = await asyncio.get_running_loop().sock_recv(line, 4096)
        if not data:
            raise EOFError("the connection ended without a reply")
        heard += data
    return int(heard.split()[1])


async def connected(gateway: str, read_buffer: int | None = None) -> socket.socket:
    address = urlsplit(gateway)
    line = socket.socket()
    line.setblocking(False)
    if read_buffer:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_buffer)
    await asyncio.get_running_loop().sock_connect(line, (address.hostname, address.port))
    return line


async def too_long(gateway: str, draw: random.Random) -> int:
    words = " ".join(f"word{draw.randint(0, 99)}" for _ in range(1000)) * 150  # about 1 MiB
    body = json.dumps({"messages": [{"role": "user", "content": words}], "max_tokens": 5}).encode()
    return await said(gateway, head(draw.choice(PATHS[:2]), len(body)) + body)


async def too_large(gateway: str, draw: random.Random) -> int:
    return await said(gateway, head(draw.choice(PATHS), 33 * MIB))


async def broken_json(gateway: str, draw: random.Random) -> int:
    body = json.dumps(HI).encode()[: -draw.randint(1, 10)]
    return await said(gateway, head(draw.choice(PATHS), len(body)) + body)


async def unserved_field(gateway: str, draw: random.Random) -> int:
    body = json.dumps(HI | {"mirostat": draw.randint(1, 2), "max_tokens": 5}).encode()
    return await said(gateway, head(draw.choice(PATHS), len(body)) + body)


async def without_key(gateway: str, draw: random.Random) -> int:
    return await said(gateway, head(draw.choice(PATHS), 10 * MIB, None) + b"{" * MIB)


async def half_sent(gateway: str, draw: random.Random) -> int:
    """The rest of the body never comes."""
    return await said(gateway, head(draw.choice(PATHS), 10_000) + b'{"messages": [')


async def half_sent_and_left(gateway: str, draw: random.Random) -> None:
    with closing(await connected(gateway)) as line:
        await asyncio.get_running_loop().sock_sendall(line, head(draw.choice(PATHS), 10_000) + b"{")


async def left(gateway: str, draw: random.Random) -> int:
    """The client leaves in the middle of its stream."""
    body = json.dumps(HI | {"stream": True}).encode()
    with closing(await connected(gateway)) as line:
        await asyncio.get_running_loop().sock_sendall(line, head(CHAT_PATH, len(body)) + body)
        return await status_of(line)


async def stopped_reading(gateway: str, draw: random.Random) -> int:
    """The client reads the status, and then nothing more, until the gateway disconnects it."""
    session_id = f"stopped-{draw.randrange(2**64)}"
    asked = {
        "stream": True,
        "logprobs": True,
        "top_logprobs": 5,  # more bytes for each token: the answer exceeds all buffers several times
        "max_tokens": LONG_TOKENS,
        "metadata": {"session_id": session_id},
    }
    body = json.dumps(HI | asked).encode()
    with closing(await connected(gateway, 4096)) as line:
        await asyncio.get_running_loop().sock_sendall(line, head(CHAT_PATH, len(body)) + body)
        status = await status_of(line)
        while line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # a client that does not read gets no event when its connection is reset
        await recorded_as_aborted(gateway, session_id)
        return status


async def black_holed(gateway: str, draw: random.Random) -> int:
    """Nobody reads the first connection. The retry on another one gets the whole answer."""
    more = {"stream": True, "logprobs": True, "max_tokens": LONG_TOKENS}
    body = json.dumps(HI | more | {"metadata": {"session_id": f"hole-{draw.randrange(2**64)}"}}).encode()
    loop = asyncio.get_running_loop()
    with closing(await connected(gateway, 4096)) as hole, closing(await connected(gateway)) as line:
        await loop.sock_sendall(hole, head(CHAT_PATH, len(body)) + body)
        await status_of(hole)
        await loop.sock_sendall(line, head(CHAT_PATH, len(body), attempt=1) + body)
        status, heard = await status_of(line), b""
        while data := await loop.sock_recv(line, 2**16):
            heard = heard[-64:] + data
        if b"data: [DONE]" not in heard:
            raise EOFError(f"the retry's answer ends with {heard[-64:]!r}")
        return status


async def deadly(gateway: str, draw: random.Random) -> int:
    """The engine dies of it. So the second time it is refused at once."""
    said_once = {"messages": [{"role": "user", "content": f"die {draw.randrange(2**64)}"}]}
    body = json.dumps(said_once | {"max_tokens": DEADLY_TOKENS}).encode()
    first = await said(gateway, head(CHAT_PATH, len(body)) + body)
    again = await said(gateway, head(CHAT_PATH, len(body), attempt=1) + body)
    if again != first:
        raise EOFError(f"{first}, and then {again}")
    return first


async def recorded_as_aborted(gateway: str, session_id: str) -> None:
    """Wait until the session's only turn is recorded. Raises EOFError unless it was aborted."""
    url, headers = f"{gateway}/sessions/{session_id}", {"authorization": f"Bearer {CLIENT_KEY}"}
    ends: list[str] = []
    while not ends:
        view = (await asyncio.to_thread(httpx.get, url, headers=headers, timeout=PATIENCE_S)).json()
        ends = [turn["finish_reason"] for turn in view["turns"]]
        await asyncio.sleep(0.2)  # the gateway records the turn after the connection has ended
    if ends != ["abort"]:
        raise EOFError(f"{session_id} has the turns {ends}")


ESTABLISHED = 1
"""Linux' TCP_ESTABLISHED, the first byte of TCP_INFO."""
WAYS: dict[str, tuple[Way, Collection[int | None]]] = {
    "too long": (too_long, (400,)),
    "too large": (too_large, (413,)),
    "broken JSON": (broken_json, (400,)),
    "unserved field": (unserved_field, (400,)),
    "without key": (without_key, (401,)),
    "half sent": (half_sent, (408,)),
    "half sent and left": (half_sent_and_left, (NO_REPLY,)),
    "left": (left, (200,)),
    "stopped reading": (stopped_reading, (200,)),
    "black hole": (black_holed, (200,)),
    DEADLY: (deadly, (400,)),
}
