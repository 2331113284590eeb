"""A session does not expire while a call of it is in flight."""

import json
from functools import partial

import pytest

from gateway.sessions import in_flight
from tests.support.gateway.calls import Call, codes
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until

TTL_S = 3.0
"""Each poll of a busy machine may be late by a third of it."""


def expired(gateway: RunningGateway, path: str) -> bool:
    return bool(gateway.get(path).json()["verdict"]["code"] == "expired")


@pytest.mark.parametrize("margin_s", [in_flight.MARGIN_S, TTL_S / 3], ids=["put off once", "put off often"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_flight_keeps_its_session_open(
    gated: RunningGateway, monkeypatch: pytest.MonkeyPatch, margin_s: float, stream: bool
) -> None:
    monkeypatch.setattr(in_flight, "MARGIN_S", margin_s)
    session = gated.session(ttl_s=TTL_S)
    call = Call(gated, session, stream=stream)
    asked(gated, 1)
    bystander = f"/sessions/{gated.session(ttl_s=TTL_S)['session_id']}"  # opened later, and without calls
    wait_until(partial(expired, gated, bystander))
    assert gated.get(f"/sessions/{session['session_id']}").json()["state"] == "open"
    let_on(gated)
    status, body = call.answer()
    assert status == 200
    assert b"error" not in body
    assert stream or json.loads(body)["choices"][0]["finish_reason"] == "stop"
    assert [code[1] for code in codes(gated, session)] == ["stop"]


def test_a_session_expires_after_its_last_call(gated: RunningGateway) -> None:
    session = gated.session(ttl_s=TTL_S)
    call = Call(gated, session)
    asked(gated, 1)
    let_on(gated)
    assert call.answer()[0] == 200
    path = f"/sessions/{session['session_id']}"
    wait_until(partial(expired, gated, path))
