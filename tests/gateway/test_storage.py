"""Redis refuses, or is gone: no success for what is not recorded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from rollout_queue.redis import keys
from tests.gateway.conftest import ADMIN_KEY, Door, Stage


@contextmanager
def full(door: Door) -> Iterator[None]:
    """Redis answers what it is asked, and stores nothing more."""
    door.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        door.redis.config_set("maxmemory", 0)


def test_an_answer_that_cannot_be_stored_is_503(door: Door) -> None:
    session = door.session()
    with full(door), pytest.raises(openai.InternalServerError) as caught:
        door.client(session).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert caught.value.status_code == 503
    assert caught.value.type == "storage_unavailable"
    assert caught.value.response.headers["retry-after"]
    assert len(door.engine.requests) == 1
    assert door.turns(session) == []
    assert door.redis.xlen(keys.STREAM) == 0


def test_a_stream_that_cannot_be_stored_ends_in_an_error_without_done(door: Door) -> None:
    door.engine.script.append("one two three")
    session = door.session()
    with full(door):
        reply = door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", stream=True)
    *chunks, last = [line[6:] for line in reply.text.splitlines() if line]
    assert json.loads(last)["error"]["type"] == "storage_unavailable"
    assert "[DONE]" not in reply.text
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(chunks)
    assert door.turns(session) == []


def test_a_full_redis_takes_no_session_group_or_reward(door: Door) -> None:
    path = f"/sessions/{door.session()['session_id']}"
    with full(door):
        for where, body in (
            ("/sessions", {}),
            ("/groups", {"size": 2, "group_id": "g"}),
            (f"{path}/reward", {"value": 1.0}),
            (f"{path}/finish", {"status": "completed"}),
        ):
            reply = door.post(where, body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable"), where
        assert door.get(path).json()["state"] == "open"
        assert door.post("/admin/rollout_servers/engine-0/drain", key=ADMIN_KEY).status_code == 503
    assert door.post("/groups", {"size": 2, "group_id": "g"}).status_code == 201


def test_a_gateway_starts_on_a_redis_that_is_full(door: Door, stage: Stage) -> None:
    with full(door), stage.door() as second:
        assert second.get("/live").status_code == 200
