"""A client that offers HTTP/2, or that cannot read chunks, is served as any other."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from rollout_queue import clock
from rollout_queue.http.bounded_protocol import BoundedProtocol, ConnectionBounds, ConnectionCount
from tests.support.hypothesis_profiles import examples

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TURNS = 20
"""Turns of the event loop that an answer takes at most."""


@dataclass(frozen=True)
class Sent:
    """A request as a client writes it."""

    body: bytes | None = b"{}"
    chunks: tuple[int, ...] = ()
    """The sizes of its first chunks; without any, the body has a length."""
    offer: str | None = None
    """What the client would rather speak."""
    more: str = ""
    version: str = "1.1"
    path: str = "/x"

    @property
    def wire(self) -> bytes:
        lines = [f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/{self.version}", "host: x"]
        if self.offer is not None:
            lines += [
                "Connection: Upgrade, HTTP2-Settings",
                f"Upgrade: {self.offer}",
                "HTTP2-Settings: AAEAA",
            ]
        if self.body is not None:
            lines.append("transfer-encoding: chunked" if self.chunks else f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, self.more]).encode() + b"\r\n" * (2 if self.more else 1) + self._content

    @property
    def _content(self) -> bytes:
        if self.body is None or not self.chunks:
            return self.body or b""
        written, left = b"", self.body
        for size in (*self.chunks, len(self.body)):
            if part := left[:size]:
                written += b"%x;a=b\r\n%b\r\n" % (len(part), part)
            left = left[size:]
        return written + b"0\r\ntrailer: 1\r\n\r\n"


class Wire(asyncio.Transport):
    """A connection whose client only writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write_eof(self) -> None: ...


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what was asked: whole with `?whole`, else in pieces whose number nobody knows before."""
    body = b"%b %b " % (scope["method"].encode(), scope["path"].encode())
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-length", b"%d" % len(body))] if scope["query_string"] == b"whole" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    size = max(5, len(body) // 9)
    for start in range(0, len(body), size):
        await send({"type": "http.response.body", "body": body[start : start + size], "more_body": True})
    await send({"type": "http.response.body"})


def heard(data: bytes, cuts: Sequence[int] = (), **bounds: Any) -> Wire:
    """The connection after a client has sent this, cut into segments."""

    async def play() -> Wire:
        config = uvicorn.Config(echo, log_config=None, access_log=False)
        wire = Wire()
        protocol = BoundedProtocol(
            ConnectionCount(ConnectionBounds(**bounds)),
            config=config,
            server_state=ServerState(),
            app_state={},
        )
        protocol.connection_made(wire)
        places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in pairwise(places):
            if start < end and not wire.closed:
                protocol.data_received(data[start:end])
            for _ in range(TURNS):
                await asyncio.sleep(0)  # the application runs meanwhile; it waits for nothing else
        protocol.connection_lost(None)
        return wire

    return asyncio.run(play())


def answers(requests: Sequence[Sent], cuts: Sequence[int] = ()) -> bytes:
    return heard(b"".join(each.wire for each in requests), cuts).written.replace(CONTINUE, b"")


OFFERS = st.sampled_from(["h2c", "H2C", "websocket", "TLS/1.3, h2c", "x" * 300])
BODIES = st.binary(max_size=40) | st.just(b"GET / HTTP/1.1\r\n\r\n") | st.just(b"x" * 70_000)
REQUESTS = st.builds(
    Sent,
    body=st.none() | BODIES,
    chunks=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    offer=st.none() | OFFERS,
    more=st.sampled_from(["", "expect: 100-continue"]),
    path=st.sampled_from(["/x", "/y?whole"]),
)


@pytest.mark.hypothesis
@settings(max_examples=examples(150), deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=4), st.lists(st.integers(0, 10**6), max_size=6))
def test_a_request_with_an_offer_is_the_same_request(requests: list[Sent], cuts: list[int]) -> None:
    plain = answers([replace(each, offer=None) for each in requests])
    assert plain.count(b"HTTP/1.1 200 ") == len(requests)
    assert answers(requests, cuts) == plain


def test_limits_hold_behind_an_offer() -> None:
    offered = Sent(b"x", (1,), "h2c")
    large = heard(Sent(b"x", offer="h2c" + "x" * 2000).wire, head_bytes=1024)
    assert large.written.startswith(b"HTTP/1.1 431 ")
    for tail in (b"1;" + b"x" * 3000, b"1\r\nx\r\n0\r\na: " + b"x" * 3000):
        assert heard(offered.wire.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + tail, head_bytes=1024).closed
    many = heard(Sent(None, offer="h2c").wire * 40)
    assert many.closed
    broken = offered.wire.replace(b"chunked", b"gzip")
    assert heard(broken).written.startswith(b"HTTP/1.1 400 ")
    assert heard(broken).closed


@pytest.mark.hypothesis
@settings(max_examples=examples(50), deadline=None)
@given(BODIES, st.sampled_from(["", "connection: keep-alive", "expect: 100-continue"]), st.booleans())
def test_a_client_of_http_1_0_reads_until_the_connection_ends(body: bytes, more: str, whole: bool) -> None:
    path = "/x?whole" if whole else "/x"
    wire = heard(Sent(body, more=more, version="1.0", path=path).wire)
    head, _, content = wire.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (content, wire.closed) == (b"POST /x " + body, True)


@pytest.mark.parametrize("before", [0, 20, -1])
def test_what_arrives_while_the_process_stands_still_has_arrived_in_time(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many bytes of a request come before that. uvloop may look at its timers before it reads."""
    monkeypatch.setattr(clock, "LAST_LOOK_S", 60.0)  # a busy machine may take long for what follows
    request = Sent(b"x" * 100).wire

    async def play() -> bytes:
        config = uvicorn.Config(echo, log_config=None, access_log=False)
        count, wire = ConnectionCount(ConnectionBounds(head_timeout_s=0.3, body_timeout_s=0.3)), Wire()
        protocol = BoundedProtocol(count, config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(wire)
        protocol.data_received(request[:before])
        time.sleep(1.0)  # noqa: ASYNC251 - the whole loop stands still
        for _ in range(3):
            await asyncio.sleep(0)  # timers that are due are called
        if not wire.closed:
            protocol.data_received(request[before:])
        for _ in range(TURNS):
            await asyncio.sleep(0)  # the application runs meanwhile
        protocol.connection_lost(None)
        return wire.written

    assert asyncio.run(play()).startswith(b"HTTP/1.1 200")
