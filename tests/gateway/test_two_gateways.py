"""Two gateways on one Redis: either serves the next call, and what one is told the other knows."""

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import ADMIN_KEY, Door, Stage, wait_until


@pytest.fixture
def other(door: Door, stage: Stage) -> Iterator[Door]:
    with stage.door() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        yield other


def test_a_conversation_may_change_its_gateway(door: Door, other: Door) -> None:
    session = door.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    answer = door.chat("hi", path=path, key=session["api_key"]).json()["choices"][0]["message"]["content"]
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
        {"role": "tool", "content": "more", "tool_call_id": "c"},
    ]
    second = other.post(path, {"messages": history}, key=session["api_key"])
    assert second.status_code == 200
    assert [turn["relation"] for turn in door.turns(session)] == ["root", "extends"]


def test_a_number_is_given_once_among_gateways(door: Door, other: Door) -> None:
    for gateway, location in ((door, "file:///a"), (other, "file:///b")):
        gateway.post("/admin/policies", {"location": location}, key=ADMIN_KEY)
    known = door.get("/admin/policies", key=ADMIN_KEY).json()["data"]
    assert [(record["version"], record["location"]) for record in known] == [
        (1, "file:///a"),
        (2, "file:///b"),
    ]
    taken = other.post("/admin/policies", {"version": 2, "location": "file:///c"}, key=ADMIN_KEY)
    assert taken.status_code == 409


def test_a_server_that_is_drained_at_one_gateway_is_drained_at_both(door: Door, other: Door) -> None:
    def state() -> str:
        (server,) = other.get("/admin/rollout_servers", key=ADMIN_KEY).json()["data"]
        return str(server["state"])

    assert door.post("/admin/rollout_servers/engine-0/drain", key=ADMIN_KEY).status_code == 200
    wait_until(lambda: state() == "draining")
    assert other.chat().status_code == 503
    assert door.post("/admin/rollout_servers/engine-0/resume", key=ADMIN_KEY).status_code == 200
    wait_until(lambda: state() == "ready")
    assert other.chat().status_code == 200
