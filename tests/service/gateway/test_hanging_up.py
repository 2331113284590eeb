"""If a client leaves during its answer, the engine stops, and the sampled tokens are recorded as aborted."""

import json
import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.gateway.running import CLIENT_KEY, RunningGateway
from tests.support.waiting import wait_until

LONG_ANSWER = [5] * 100
"""More tokens than the engine sends in one event for a call that does not stream."""


def dial(gateway: RunningGateway, session: dict[str, Any], stream: bool, n: int = 1) -> socket.socket:
    """Send a call on a plain socket, and do not wait for the answer."""
    address = urlsplit(gateway.url)
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": n}
    body = json.dumps(asked).encode()
    head = (
        f"POST /sessions/{session['session_id']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {CLIENT_KEY}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    line = socket.create_connection((address.hostname, address.port or 80))
    line.sendall(head.encode() + body)
    return line


@pytest.mark.parametrize(("stream", "sampled"), [(False, 64), (True, 3)])
def test_a_client_that_goes_away_aborts_its_answer(
    gateway: RunningGateway, stream: bool, sampled: int
) -> None:
    gateway.engine.script.append(list(LONG_ANSWER))
    gateway.engine.stall_after = sampled
    session = gateway.session()
    with dial(gateway, session, stream) as line:
        wait_until(lambda: gateway.engine.stalled)
        if stream:
            assert line.recv(4096).startswith(b"HTTP/1.1 200")
    wait_until(lambda: gateway.turns(session))
    (turn,) = gateway.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert turn["output_ids"] == LONG_ANSWER[:sampled]
    assert turn["versions"] == [{"version": 0, "start": 0, "end": sampled}]
    assert gateway.engine.aborted == [turn["turn_id"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_the_first_token_aborts_too(
    gateway: RunningGateway, stream: bool
) -> None:
    gateway.engine.stall_after = 0
    session = gateway.session()
    with dial(gateway, session, stream):
        wait_until(lambda: gateway.engine.stalled)
    wait_until(lambda: gateway.turns(session))
    (turn,) = gateway.turns(session)
    assert (turn["finish_reason"], turn["output_ids"]) == ("abort", [])
    assert gateway.engine.aborted == [turn["turn_id"]]


def test_a_session_goes_on_after_an_aborted_call(gateway: RunningGateway) -> None:
    gateway.engine.stall_after = 0
    session = gateway.session()
    with dial(gateway, session, stream=True):
        wait_until(lambda: gateway.engine.stalled)
    wait_until(lambda: gateway.turns(session))
    gateway.engine.stall_after = None
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    assert reply.status_code == 200
    assert [turn["finish_reason"] for turn in gateway.turns(session)] == ["abort", "stop"]


def test_of_several_choices_those_that_were_done_are_recorded_as_well(gateway: RunningGateway) -> None:
    """The client got none of the choices, so that the finished one is recorded as aborted, too."""
    gateway.engine.script.extend(["short", list(LONG_ANSWER)])
    gateway.engine.stall_after = 64
    session = gateway.session()
    with dial(gateway, session, stream=False, n=2):
        wait_until(lambda: gateway.engine.stalled)
        wait_until(lambda: len(gateway.engine.requests) == 2)
    wait_until(lambda: len(gateway.turns(session)) == 2)
    turns = gateway.turns(session)
    assert {turn["verdict"]["code"] for turn in turns} == {"aborted"}
    assert sorted(turn["output_len"] for turn in turns)[1] == 64


def test_a_turn_that_is_lost_after_its_client_left_is_an_error_in_the_log(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    session = gateway.session()

    def appending() -> int:
        """How many bytes wait in Redis behind an append that Redis holds back; -1 without such an append."""
        lines = gateway.redis.client_list()
        held = (line["qbuf"] for line in lines if "b" in line["flags"] and line["cmd"] == "evalsha")
        return int(next(held, -1))

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    gateway.redis.config_set("maxmemory", 1)
    gateway.redis.client_pause(30_000, all=False)
    try:
        with dial(gateway, session, stream=False):
            wait_until(lambda: appending() >= 0)
            before = appending()
        wait_until(lambda: appending() > before)  # the gateway has sent the append a second time
        gateway.redis.client_unpause()
        wait_until(errors)
    finally:
        gateway.redis.client_unpause()
        gateway.redis.config_set("maxmemory", 0)
    (request,) = gateway.engine.requests
    (said,) = errors()
    assert said.startswith(f"turn {request['rid']} is not recorded: Redis: ")
    assert gateway.turns(session) == []
