"""What agents' harnesses add to their calls: their own session ids, WebSockets, and extra fields."""

from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

OWN = "01a20759-28fd-7e22-8294-cfff8c642879"
HARNESSES = {
    "codex": {"session-id": OWN, "thread-id": OWN, "originator": "codex_exec"},
    "opencode": {"x-session-affinity": OWN, "x-session-id": OWN},
    "claude code": {"x-claude-code-session-id": OWN},
}


def ask(gateway: RunningGateway, path: str = "/v1/responses", **more: Any) -> Any:
    return gateway.post(path, {"input": "hi"} | more.pop("body", {}), **more)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_names_its_session_with_a_client_key(gateway: RunningGateway, name: str) -> None:
    reply = ask(gateway, headers=HARNESSES[name])
    assert (reply.status_code, reply.headers["x-weir-session-id"]) == (200, OWN)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_session_that_a_harness_was_given_counts_before_its_own(gateway: RunningGateway, name: str) -> None:
    session, headers = gateway.session(), HARNESSES[name]
    path = f"/sessions/{session['session_id']}/v1/responses"
    for reply in (
        ask(gateway, key=session["api_key"], headers=headers),
        ask(gateway, path, key=session["api_key"], headers=headers),
        ask(gateway, path, headers=headers),
    ):
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-weir-session-id"] == session["session_id"]


@pytest.mark.parametrize("name", ["session-id", "session_id", "x-session-id"])
def test_a_session_key_does_not_open_a_session_that_the_header_names(
    gateway: RunningGateway, name: str
) -> None:
    session = gateway.session()
    assert ask(gateway, key=session["api_key"], headers={name: OWN}).status_code == 403


def test_a_websocket_is_refused_with_the_status_that_makes_codex_post(gateway: RunningGateway) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    reply = gateway.get("/v1/responses", headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (426, "invalid_request_error")
    assert reply.headers["allow"] == "POST"
    assert gateway.get("/v1/responses").status_code == 405


def test_metadata_of_the_client_changes_nothing(gateway: RunningGateway) -> None:
    prompts = []
    for metadata in (None, {"turn_id": "1"}):
        assert ask(gateway, body={"client_metadata": metadata}).status_code == 200
        prompts.append(gateway.engine.requests[-1]["input_ids"])
    assert prompts[0] == prompts[1]
