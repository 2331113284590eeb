"""The keys of sessions stop working when the client key that opened the sessions is no longer a key."""

from collections.abc import Iterator

import pytest

from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, Backends, RunningGateway


@pytest.fixture
def later(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    """A gateway on the same Redis, whose operator has taken CLIENT_KEY out of the settings."""
    with backends.gateway(client_keys=[OTHER_KEY]) as running:
        yield running


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_no_call_is_served(gateway: RunningGateway, later: RunningGateway, path: str) -> None:
    session = gateway.session()
    for prefix in ("", f"/sessions/{session['session_id']}"):
        assert gateway.chat(path=prefix + path, key=session["api_key"], max_tokens=4).status_code == 200
        reply = later.chat(path=prefix + path, key=session["api_key"], max_tokens=4)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_no_heartbeat_keeps_the_session_open(gateway: RunningGateway, later: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/heartbeat"
    assert gateway.post(path, key=session["api_key"]).status_code == 200
    reply = later.post(path, key=session["api_key"])
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


def test_sessions_of_other_keys_go_on(gateway: RunningGateway, later: RunningGateway) -> None:
    for key in (OTHER_KEY, ADMIN_KEY):
        session = gateway.post("/sessions", key=key).json()
        assert later.chat(key=session["api_key"]).status_code == 200


def test_an_admin_still_reads_and_ends_the_session(gateway: RunningGateway, later: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    assert later.get(path, key=ADMIN_KEY).status_code == 200
    assert later.post(f"{path}/finish", {"status": "abandoned"}, key=ADMIN_KEY).status_code == 200
