"""A client that goes away in the middle: the engine stops, and what was sampled is recorded as aborted."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import CLIENT_KEY, Door, wait_until

LONG_ANSWER = [5] * 100
"""More tokens than one event brings to a client that does not stream."""


def dial(door: Door, session: dict[str, Any], stream: bool) -> socket.socket:
    """A call on the wire, whose answer is not awaited."""
    address = urlsplit(door.url)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    head = (
        f"POST /sessions/{session['session_id']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {CLIENT_KEY}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    line = socket.create_connection((address.hostname, address.port or 80))
    line.sendall(head.encode() + body)
    return line


@pytest.mark.parametrize(("stream", "sampled"), [(False, 64), (True, 3)])
def test_a_client_that_goes_away_aborts_its_answer(door: Door, stream: bool, sampled: int) -> None:
    door.engine.script.append(list(LONG_ANSWER))
    door.engine.stall_after = sampled
    session = door.session()
    with dial(door, session, stream) as line:
        wait_until(lambda: door.engine.stalled)
        if stream:
            assert line.recv(4096).startswith(b"HTTP/1.1 200")
    wait_until(lambda: door.turns(session))
    (turn,) = door.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert turn["output_ids"] == LONG_ANSWER[:sampled]
    assert turn["versions"] == [{"version": 0, "start": 0, "end": sampled}]
    assert door.engine.aborted == [turn["turn_id"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_the_first_token_aborts_too(door: Door, stream: bool) -> None:
    door.engine.stall_after = 0
    session = door.session()
    with dial(door, session, stream):
        wait_until(lambda: door.engine.stalled)
    wait_until(lambda: door.turns(session))
    (turn,) = door.turns(session)
    assert (turn["finish_reason"], turn["output_ids"]) == ("abort", [])
    assert door.engine.aborted == [turn["turn_id"]]


def test_a_session_goes_on_after_an_aborted_call(door: Door) -> None:
    door.engine.stall_after = 0
    session = door.session()
    with dial(door, session, stream=True):
        wait_until(lambda: door.engine.stalled)
    wait_until(lambda: door.turns(session))
    door.engine.stall_after = None
    reply = door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    assert reply.status_code == 200
    assert [turn["finish_reason"] for turn in door.turns(session)] == ["abort", "stop"]
