"""Neither idle sessions nor answers that nobody reads take the gateway's memory, and readers have a time."""

import fcntl
import gc
import json
import os
import socket
import sys
import termios
import time
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from gateway.edge.request import WATCH_AFTER_S
from gateway.settings import LimitSettings
from rollout_queue.contract.ids import new_id
from rollout_queue.redis import key_names
from rollout_queue.redis.session_heads import SESSION_BYTES, TURN_BYTES
from tests.support.gateway.calls import RETRY
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.waiting import wait_until

KIB = 1024
SHORT_S = 2.0
ESTABLISHED = 1
"""Linux' TCP_ESTABLISHED: the first byte of TCP_INFO while a connection is open."""
ID_BYTES = sys.getsizeof(f"s-{new_id()}")
"""What a session would take of which nothing but its id is remembered."""
SOME_SESSIONS = 20 * (SESSION_BYTES + TURN_BYTES)
"""Memory for about twenty sessions of one turn."""
BETWEEN_BYTES = 64 * KIB + 3 * 8 * KIB
"""How much uvicorn and the kernel buffer between the gateway and a client that does not read."""
ANSWER = 4000
"""Tokens of an answer that is longer than these buffers. The model's context allows no more."""
ASKED = json.dumps(
    {"stream": True, "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
).encode()

OURS = [
    tracemalloc.Filter(True, f"*/{room}/*")
    for room in ("gateway", "rollout_queue", "redis", "uvicorn", "aiohttp")
]
OF_CALLS = ("gateway.", "rollout_queue.", "uvicorn.")
NOT_OURS = [tracemalloc.Filter(False, "*/tests/*")]


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def held_bytes() -> int:
    """The bytes that the gateway's code and its network libraries have allocated and not freed."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([*OURS, *NOT_OURS])
    return sum(trace.size for trace in snapshot.traces)


def least_growth(batches: Iterable[Callable[[], object]]) -> int:
    """The smallest growth in bytes over the batches. Memory that each batch leaks shows in all of them."""
    growths, before = [], held_bytes()
    for batch in batches:
        batch()
        after = held_bytes()
        growths.append(after - before)
        before = after
    return min(growths)


def test_ten_thousand_idle_sessions_take_no_memory_of_the_gateway(
    gateway: RunningGateway, backends: Backends
) -> None:
    limits = LimitSettings(open_sessions=20_000, open_sessions_per_key=20_000, requests_per_minute=10**6)
    with backends.gateway(limits=limits) as limited:

        def open_a_thousand() -> None:
            assert limited.post("/groups", {"size": 970}).status_code == 201
            for _ in range(30):
                limited.session()

        for _ in range(7):
            open_a_thousand()
        with traced():
            assert least_growth([open_a_thousand] * 3) < 1000 * ID_BYTES
    assert gateway.redis.zcard(key_names.SESSIONS) == 10_000


@pytest.mark.long
def test_the_gateway_remembers_so_many_sessions_and_no_more(
    gateway: RunningGateway, backends: Backends
) -> None:
    with backends.ready_gateway(session_cache_bytes=SOME_SESSIONS) as forgetful, traced():

        def sessions_call() -> None:
            for _ in range(100):
                assert forgetful.chat(key=forgetful.session()["api_key"]).status_code == 200

        assert least_growth([sessions_call] * 4) < 100 * KIB  # a session that is remembered takes 2


HI = [{"role": "user", "content": "hi"}]
CALLS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_a_call_leaves_nothing_for_the_garbage_collector(
    gateway: RunningGateway, path: str, stream: bool
) -> None:
    """Its objects are freed with their last reference: the collector would take a tenth of a turn's time."""

    def call() -> None:
        assert gateway.post(path, {"model": "policy", "stream": stream, **CALLS[path]}).status_code == 200

    call()  # whatever is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    of_calls = {name: count for name, count in left.items() if name.startswith(OF_CALLS) and count >= 10}
    assert not of_calls


def test_a_client_that_does_not_read_holds_its_stream_back(gateway: RunningGateway) -> None:
    """Without backpressure the stream would end, with the unread rest in the gateway's memory."""
    with slow_reader(gateway) as (session, line):
        wait_until(lambda: stuck(line))
        assert gateway.turns(session) == []
        said = read_to_the_end(line)
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert len(said) > 3 * BETWEEN_BYTES
        (turn,) = gateway.turns(session)
        assert (turn["finish_reason"], turn["output_len"]) == ("stop", ANSWER + 1)


def test_a_retry_gets_its_answer_although_the_first_client_does_not_read(gateway: RunningGateway) -> None:
    """The first client, whose network is cut, gets the whole answer too, if it comes back."""
    with slow_reader(gateway) as (session, line):
        wait_until(lambda: stuck(line))
        headers = {"content-type": "application/json", RETRY: "1"}
        headers["authorization"] = f"Bearer {session['api_key']}"
        again = gateway.http.post(f"{gateway.url}/v1/chat/completions", content=ASKED, headers=headers)
        assert (again.status_code, again.text.endswith("data: [DONE]\n\n")) == (200, True)
        (turn,) = gateway.turns(session)
        assert (turn["finish_reason"], turn["output_len"]) == ("stop", ANSWER + 1)
        assert read_to_the_end(line).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(gateway.engine.requests) == 1


def test_a_client_that_never_reads_and_goes_away_aborts_its_answer(gateway: RunningGateway) -> None:
    with slow_reader(gateway) as (session, line):
        wait_until(lambda: stuck(line))
        # The gateway watches a client only after WATCH_AFTER_S. No event shows that it does.
        time.sleep(2 * WATCH_AFTER_S)
        line.close()
        wait_until(lambda: gateway.turns(session))
        (turn,) = gateway.turns(session)
        assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")


@pytest.fixture
def impatient(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    """A gateway whose clients have to read. It waits for its engine, too: so its time is real."""
    with backends.ready_gateway(connections={"write_timeout_s": SHORT_S}) as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_stops_is_disconnected(impatient: RunningGateway, stream: bool) -> None:
    """A stream is recorded as aborted. A plain answer was recorded before it was sent.

    The gateway resets the connection, because the kernel would otherwise keep megabytes for the client.
    """
    with slow_reader(impatient, stream) as (session, line):
        port = line.getsockname()[1]
        wait_until(lambda: impatient.turns(session))
        (turn,) = impatient.turns(session)
        assert turn["finish_reason"] == ("abort" if stream else "stop")
        wait_until(lambda: port not in peers(psutil.Process()))
        wait_until(lambda: line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED)


def peers(process: psutil.Process) -> list[int]:
    return [each.raddr.port for each in process.net_connections("tcp4") if each.raddr]


def test_a_slow_reader_gets_its_whole_stream(impatient: RunningGateway) -> None:
    with slow_reader(impatient) as (session, line):
        heard, began = b"", time.monotonic()
        while not heard.endswith(b"0\r\n\r\n"):
            data = line.recv(65536)
            assert data, "the gateway has given it up"
            heard = heard[-10:] + data
            if time.monotonic() - began < 3 * SHORT_S:
                time.sleep(0.01)  # makes the reader slow
    (turn,) = impatient.turns(session)
    assert (turn["finish_reason"], turn["output_len"]) == ("stop", ANSWER + 1)


@contextmanager
def slow_reader(
    gateway: RunningGateway, stream: bool = True
) -> Iterator[tuple[dict[str, Any], socket.socket]]:
    """A client that has asked for a long answer with logprobs, and reads nothing of it."""
    gateway.engine.script.append([300] * ANSWER)
    gateway.engine.pace_s = 0.0005  # without a pause, all tokens would arrive, and be sent, as one chunk
    session, address = gateway.session(), urlsplit(gateway.url)
    body = ASKED if stream else ASKED.replace(b"true", b"false", 1)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session['api_key']}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
        line.connect((address.hostname, address.port))
        wait_until(lambda: narrowed(line.getsockname()))
        line.sendall(head.encode() + body)
        yield session, line


def narrowed(client: tuple[str, int]) -> bool:
    """Shrink the kernel's send buffer for this client, which otherwise takes megabytes."""
    for connection in psutil.Process().net_connections("tcp4"):
        if connection.raddr == client and connection.fd >= 0:
            with socket.socket(fileno=os.dup(connection.fd)) as theirs:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB)
            return True
    return False


def stuck(line: socket.socket) -> bool:
    """Whether something has arrived, nothing more arrives, and this process is idle."""
    before, began_s = unread(line), time.process_time()
    time.sleep(0.5)  # no event tells that nothing moves; only time shows it
    return 0 < before == unread(line) and time.process_time() - began_s < 0.2


def unread(line: socket.socket) -> int:
    count = array("i", [0])
    fcntl.ioctl(line, termios.FIONREAD, count)
    return count[0]


def read_to_the_end(line: socket.socket) -> bytes:
    said = bytearray()
    while not said.endswith(b"0\r\n\r\n"):
        said += line.recv(2**20)
    return bytes(said)
