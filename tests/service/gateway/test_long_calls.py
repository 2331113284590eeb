"""A session does not expire while a call of it is in flight."""

import json
from functools import partial
from typing import Any

import pytest

from gateway.sessions import lifetime
from rollout_queue import clock
from rollout_queue.redis import key_names
from tests.support.gateway.calls import Call, codes
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import RunningGateway
from tests.support.long_cases import in_turn
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

TTL_S = 60.0


def expired(gateway: RunningGateway, path: str) -> bool:
    return bool(gateway.get(path).json()["verdict"]["code"] == "expired")


def lasts(gateway: RunningGateway, session_id: str, seconds: float) -> bool:
    """Whether the session expires later than in so many seconds."""
    deadline: Any = gateway.redis.zscore(key_names.DEADLINES, session_id)
    return deadline is not None and deadline > clock.now() + seconds


@pytest.mark.parametrize(("margin_s", "stream"), in_turn([2 * TTL_S, lifetime.MARGIN_S], [False, True]))
def test_a_call_in_flight_keeps_its_session_open(
    gated_timed: RunningGateway,
    turned: TurnedClock,
    monkeypatch: pytest.MonkeyPatch,
    margin_s: float,
    stream: bool,
) -> None:
    monkeypatch.setattr(lifetime, "MARGIN_S", margin_s)
    gated = gated_timed
    session = gated.session(ttl_s=TTL_S)
    call = Call(gated, session, stream=stream)
    asked(gated, 1)
    bystander = f"/sessions/{gated.session(ttl_s=TTL_S)['session_id']}"  # opened later, and without calls
    for _ in range(6):  # a step is shorter than what every poll leaves the session
        turned.turn(TTL_S / 5)
        wait_until(partial(lasts, gated, session["session_id"], TTL_S / 5))
    wait_until(partial(expired, gated, bystander))
    assert gated.get(f"/sessions/{session['session_id']}").json()["state"] == "open"
    let_on(gated)
    status, body = call.answer()
    assert status == 200
    assert b"error" not in body
    assert stream or json.loads(body)["choices"][0]["finish_reason"] == "stop"
    assert [code[1] for code in codes(gated, session)] == ["stop"]


def test_a_session_expires_after_its_last_call(gated_timed: RunningGateway, turned: TurnedClock) -> None:
    gated = gated_timed
    session = gated.session(ttl_s=TTL_S)
    call = Call(gated, session)
    asked(gated, 1)
    let_on(gated)
    assert call.answer()[0] == 200
    path = f"/sessions/{session['session_id']}"
    turned.turn(TTL_S)
    wait_until(partial(expired, gated, path))
