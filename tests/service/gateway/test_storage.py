"""When Redis refuses a write or is gone, no call succeeds whose turn is not recorded."""

import json
from typing import Any

import pytest

from rollout_queue.redis import key_names
from tests.support.gateway.full_redis import full
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_an_answer_that_cannot_be_stored_is_503(
    gateway: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    session = gateway.session()
    with full(gateway):
        reply = gateway.post(f"/sessions/{session['session_id']}{path}", body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")
    assert reply.headers["retry-after"]
    assert len(gateway.engine.requests) == 1
    assert gateway.turns(session) == []
    assert gateway.redis.xlen(key_names.STREAM) == 0


def test_a_stream_that_cannot_be_stored_ends_in_an_error_without_done(gateway: RunningGateway) -> None:
    gateway.engine.script.append("one two three")
    session = gateway.session()
    with full(gateway):
        reply = gateway.chat(session=session, stream=True)
    *chunks, last = [line[6:] for line in reply.text.splitlines() if line]
    assert json.loads(last)["error"]["type"] == "storage_unavailable"
    assert "[DONE]" not in reply.text
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert gateway.turns(session) == []


def test_a_full_redis_takes_no_session_group_or_reward(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    with full(gateway):
        for where, body in (
            ("/sessions", {}),
            ("/groups", {"size": 2, "group_id": "g"}),
            (f"{path}/reward", {"value": 1.0}),
            (f"{path}/finish", {"status": "completed"}),
        ):
            reply = gateway.post(where, body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable"), where
        assert gateway.get(path).json()["state"] == "open"
        assert gateway.post("/admin/rollout_servers/engine-0/drain", key=ADMIN_KEY).status_code == 503
    assert gateway.post("/groups", {"size": 2, "group_id": "g"}).status_code == 201


def test_a_gateway_starts_on_a_redis_that_is_full(gateway: RunningGateway, backends: Backends) -> None:
    with full(gateway), backends.gateway() as second:
        assert second.get("/live").status_code == 200
