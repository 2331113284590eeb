"""The gateway checks a key before it reads the body, and bounds its connections in number, size and time."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from gateway.app import create_app
from rollout_queue import clock
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.serving import Served
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

MIB = 2**20
TIMEOUT_S = 60.0
"""The timeouts of the gateway, of which only a test's clock lets so much pass."""
PER_ADDRESS = 40
CHAT_PATH = "/v1/chat/completions"
PATHS = (CHAT_PATH, "/v1/messages", "/v1/messages/count_tokens", "/sessions", "/sessions/x/reward")
READ_AHEAD = 2 * 2**18
"""The bytes of an unread body that a connection holds in memory: two of uvloop's reads."""


@pytest.fixture(scope="module")
def turned() -> TurnedClock:
    return TurnedClock()


@pytest.fixture(scope="module")
def bounded(own_backends: Backends, turned: TurnedClock) -> Iterator[RunningGateway]:
    bounds = {"head_timeout_s": TIMEOUT_S, "body_timeout_s": TIMEOUT_S, "per_address": PER_ADDRESS}
    own_backends.clear(None)
    with ExitStack() as stack:
        with clock.using(turned):
            gateway = stack.enter_context(own_backends.gateway(connections=bounds, context_length=10**6))
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway


@pytest.fixture
def pass_time(bounded: RunningGateway, turned: TurnedClock) -> Callable[[float], None]:
    """Lets seconds pass, once the gateway has read what was sent to it before."""

    def pass_(seconds: float) -> None:
        for _ in range(3):  # later calls of the same event loop: it accepts a connection, then it reads there
            assert bounded.get("/live").status_code == 200
        turned.turn(seconds)

    return pass_


@contextmanager
def connected(gateway: RunningGateway) -> Iterator[socket.socket]:
    address = urlsplit(gateway.url)
    with socket.create_connection((address.hostname, address.port or 80), timeout=300) as line:
        yield line


OFFER = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
"""With each request, Java's HttpClient offers to speak HTTP/2."""


def head(
    path: str, size: int, key: str | None = CLIENT_KEY, kind: str = "application/json", more: str = ""
) -> bytes:
    given = (f"authorization: Bearer {key}\r\n" if key else "") + more
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\n{given}content-length: {size}\r\n\r\n"
    ).encode()


def answer(line: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the error of the next answer."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        heard += received(line)
    first, _, body = heard.partition(b"\r\n\r\n")
    lines = first.decode().lower().splitlines()
    size = next(int(each.partition(":")[2]) for each in lines if each.startswith("content-length"))
    while len(body) < size:
        body += received(line)
    error: dict[str, Any] = json.loads(body)["error"]
    return int(lines[0].split()[1]), error


def received(line: socket.socket) -> bytes:
    data = line.recv(65536)
    assert data, "the connection ended within the answer"
    return data


def closed(line: socket.socket) -> bool:
    try:
        return line.recv(65536) == b""
    except ConnectionResetError:
        return True


# Keys first


@pytest.mark.parametrize("path", [*PATHS, "/admin/policies"])
def test_a_call_without_a_key_is_401_before_its_body_arrives(bounded: RunningGateway, path: str) -> None:
    for kind, size in (("application/json", 100), ("application/json", 10**12), ("text/xml", 100)):
        with connected(bounded) as line:
            line.sendall(head(path, size, None, kind))
            status, error = answer(line)
            assert (status, error["type"]) == (401, "authentication_error")
    malformed = bounded.call(
        "POST", path, key=None, content=b"{", headers={"content-type": "application/json"}
    )
    assert malformed.status_code == 401


def test_a_malformed_body_with_a_clients_key_is_403_on_an_admin_path(bounded: RunningGateway) -> None:
    for key, status in ((CLIENT_KEY, 403), (ADMIN_KEY, 400)):
        with connected(bounded) as line:
            line.sendall(head("/admin/policies", 1, key) + b"{")
            assert answer(line)[0] == status


def test_bodies_of_callers_without_a_key_take_no_memory(bounded: RunningGateway) -> None:
    body = b"x" * (30 * MIB)
    before, calls = psutil.Process().memory_info().rss, 20
    with ExitStack() as opened:
        lines = [opened.enter_context(connected(bounded)) for _ in range(calls)]
        for line in lines:
            line.sendall(head(CHAT_PATH, 31 * MIB, None))
        for line in lines:
            try:
                line.sendall(body)
            except ConnectionError:  # the gateway closed the connection meanwhile
                continue
        grown = psutil.Process().memory_info().rss - before
        assert grown < calls * READ_AHEAD + 16 * MIB
        assert bounded.get("/live").status_code == 200


# Time

PassTime = Callable[[float], None]


def test_a_connection_that_sends_nothing_is_closed(bounded: RunningGateway, pass_time: PassTime) -> None:
    with connected(bounded) as line, connected(bounded) as blank:
        blank.sendall(b"\r\n\r\n")
        pass_time(TIMEOUT_S)
        assert closed(line)
        assert closed(blank)


@pytest.mark.parametrize(
    "first", [b"", b"GET /sessions HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "second"]
)
@pytest.mark.parametrize("sent", [b"POST / HT", head(CHAT_PATH, 9)[:-2]])
def test_a_head_that_does_not_end_is_closed(
    bounded: RunningGateway, pass_time: PassTime, first: bytes, sent: bytes
) -> None:
    with connected(bounded) as line:
        if first:
            line.sendall(first)
            assert answer(line)[0] == 401
        line.sendall(sent)
        pass_time(TIMEOUT_S)
        assert answer(line)[0] == 408
        assert closed(line)


@pytest.mark.parametrize("more", ["", OFFER], ids=["plain", "offer"])
@pytest.mark.parametrize("path", [CHAT_PATH, "/sessions"])
def test_a_body_that_stalls_is_408(
    bounded: RunningGateway, pass_time: PassTime, path: str, more: str
) -> None:
    with connected(bounded) as line:
        line.sendall(head(path, 10_000, more=more) + b"{")
        pass_time(TIMEOUT_S)
        status, error = answer(line)
        assert (status, error["type"]) == (408, "timeout_error")
        assert closed(line)


def test_a_slow_body_that_makes_progress_is_served(bounded: RunningGateway, pass_time: PassTime) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 60_000}]}).encode()
    with connected(bounded) as line:
        line.sendall(head(CHAT_PATH, len(body)))
        for start in range(0, len(body), 4096):  # 15 parts in twice the timeout
            line.sendall(body[start : start + 4096])
            pass_time(2 * TIMEOUT_S / 15)
        assert line.recv(12) == b"HTTP/1.1 200"


def test_the_rest_of_a_refused_body_is_not_read_for_ever(
    bounded: RunningGateway, pass_time: PassTime
) -> None:
    with connected(bounded) as line:
        line.sendall(head(CHAT_PATH, 10**9, None))
        assert answer(line)[0] == 401

        def cut() -> bool:
            try:
                line.sendall(bytes(1000))
            except ConnectionError:
                return True
            pass_time(TIMEOUT_S)
            return False

        wait_until(cut)


# Other protocols


def test_a_client_that_offers_http_2_is_served(bounded: RunningGateway) -> None:
    """On one connection, as Java's HttpClient does."""
    offer = dict([each.split(": ") for each in OFFER.strip().split("\r\n")])
    expect = offer | {"expect": "100-continue", "content-type": "application/json"}
    for headers in ({}, expect):
        for name in range(2):
            made = bounded.session(session_id=f"{name}-{len(headers)}")
            reply = bounded.chat("x" * 100_000, session=made, stream=True, max_tokens=3, headers=headers)
            assert reply.text.endswith("data: [DONE]\n\n")
            asked = bounded.engine.requests[-2:]
    assert asked[0]["input_ids"] == asked[1]["input_ids"]
    chunks = (b'{"session_id": ', b'"parts"}')
    assert bounded.call("POST", "/sessions", content=iter(chunks), headers=expect).status_code == 201


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_an_answer_that_ends_with_its_connection(
    bounded: RunningGateway, stream: bool
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    for more in ("", "connection: keep-alive\r\n"):
        with connected(bounded) as line:
            line.sendall(head(CHAT_PATH, len(body), more=more).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
            heard = b""
            while data := line.recv(65536):
                heard += data
        top, _, content = heard.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in top
        if stream:
            assert content.startswith(b"data: {")
            assert content.endswith(b"}\n\ndata: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"]


# Sizes and numbers


def test_a_large_head_is_431(bounded: RunningGateway) -> None:
    long = b"x" * MIB
    for part in (
        b"GET /" + long,
        b"GET /" + long[: 2**16] + b" HTTP/1.1\r\n\r\n",  # no header is counted after it
        b"GET / HTTP/1.1\r\na: " + long,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ):
        with connected(bounded) as line:
            try:
                line.sendall(part)
            except ConnectionError:  # the gateway closed the connection meanwhile
                continue
            assert answer(line)[0] == 431


@pytest.mark.parametrize("tail", [b"1;" + b"x" * MIB, b"1\r\nx\r\n0\r\na: " + b"x" * MIB])
def test_a_body_without_content_is_cut(bounded: RunningGateway, tail: bytes) -> None:
    """Chunk extensions and trailers are no content, but a client could send them without end."""
    with connected(bounded) as line:
        line.sendall(head(CHAT_PATH, 0).replace(b"content-length: 0", b"transfer-encoding: chunked"))
        with pytest.raises(ConnectionError):
            line.sendall(tail + bytes(64 * MIB))


def test_an_address_gets_so_many_connections_and_no_more(bounded: RunningGateway) -> None:
    with ExitStack() as opened:
        idle = [opened.enter_context(connected(bounded)) for _ in range(PER_ADDRESS)]
        status, error = answer(opened.enter_context(connected(bounded)))
        assert (status, error["code"]) == (429, "connections_limit")
        idle[0].close()
    wait_until(lambda: bounded.get("/live").status_code == 200)


# A gateway that stood still


def test_what_came_while_the_gateway_stood_still_came_in_time(own_backends: Backends) -> None:
    """It stands still for longer than a head, a body, or a next request may take."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    whole = head(CHAT_PATH, len(body)) + body
    own_backends.clear(None)
    bounds = {"head_timeout_s": 2.0, "body_timeout_s": 2.0}
    settings = own_backends.settings(connections=bounds)
    served = Served(create_app(settings), bounds=settings.connections)
    gateway = RunningGateway(served.url, own_backends.engine, own_backends.redis)
    try:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        with ExitStack() as stack:
            lines = [stack.enter_context(connected(gateway)) for _ in range(3)]
            sent = [0, 40, len(whole) - 10]
            for line, begun in zip(lines, sent, strict=True):
                line.sendall(whole[:begun])
            assert gateway.get("/live").status_code == 200  # it has read that
            served.suspend()
            for line, begun in zip(lines, sent, strict=True):
                line.sendall(whole[begun:])
            time.sleep(3.0)  # nothing happens in the gateway meanwhile
            served.resume()
            for line in lines:
                assert received(line).startswith(b"HTTP/1.1 200")
    finally:
        gateway.http.close()
        served.end()
        served.join()
