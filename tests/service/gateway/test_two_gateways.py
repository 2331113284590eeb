"""Two gateways on one Redis: either serves the next call, and each knows what the other was told."""

from collections.abc import Iterator

import pytest

from tests.support.gateway.fake_rollout_server import FakeRolloutServer
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.serving import serving
from tests.support.waiting import wait_until


@pytest.fixture
def other(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    with backends.gateway() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        yield other


def test_a_conversation_may_change_its_gateway(gateway: RunningGateway, other: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    answer = gateway.chat("hi", path=path, key=session["api_key"]).json()["choices"][0]["message"]["content"]
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
        {"role": "tool", "content": "more", "tool_call_id": "c"},
    ]
    second = other.post(path, {"messages": history}, key=session["api_key"])
    assert second.status_code == 200
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends"]


def test_a_number_is_given_once_among_gateways(gateway: RunningGateway, other: RunningGateway) -> None:
    server = FakeRolloutServer()
    with serving(server.app()) as url:
        body = {"id": "r0", "url": url, "engine_url": url}
        assert gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY).status_code == 200
        for each, location in ((gateway, "file:///a"), (other, "file:///b")):
            assert each.post("/admin/policies", {"location": location}, key=ADMIN_KEY).status_code == 200
        known = gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]
    assert [(record["version"], record["location"]) for record in known] == [
        (0, None),
        (1, "file:///a"),
        (2, "file:///b"),
    ]
    taken = other.post("/admin/policies", {"version": 2, "location": "file:///c"}, key=ADMIN_KEY)
    assert taken.status_code == 409


def test_a_server_that_is_drained_at_one_gateway_is_drained_at_both(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    def state() -> str:
        (server,) = other.get("/admin/rollout_servers", key=ADMIN_KEY).json()["data"]
        return str(server["state"])

    assert gateway.post("/admin/rollout_servers/engine-0/drain", key=ADMIN_KEY).status_code == 200
    wait_until(lambda: state() == "draining")
    assert other.chat().status_code == 503
    assert gateway.post("/admin/rollout_servers/engine-0/resume", key=ADMIN_KEY).status_code == 200
    wait_until(lambda: state() == "ready")
    assert other.chat().status_code == 200
