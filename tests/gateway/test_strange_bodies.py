"""Whatever a stranger sends: an answer in the contract's shape, and never a 500."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.conftest import ADMIN_KEY, Door, Stage

CHAT_PATH = "/v1/chat/completions"
SCALARS: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63) - 1, 2**64, 10**400, 0, 1e308]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "\ud800", "a" * 300, "policy@1", "policy@", "user", "assistant", "tool", "completed"]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON})},
        optional={"id": JSON, "type": JSON},
    ),
    max_size=2,
)
PARTS = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "refusal"]), "text": JSON}),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])},
    optional={
        "content": JSON | PARTS | st.text(max_size=9),
        "tool_calls": CALLS | JSON,
        "name": JSON,
        "x": JSON,
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.dictionaries(st.text(max_size=4), JSON, max_size=2)}
    ),
    max_size=2,
)


def optional(*names: str) -> Any:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON))


CHAT = st.builds(
    lambda known, other: known | other,
    st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=3)}, optional={"tools": TOOLS}),
    optional(
        "model", "temperature", "seed", "stop", "metadata", "max_tokens", "n", "logprobs", "stream_options"
    ),
)
SESSION = optional(
    *("session_id", "task_id", "group_id", "group_size", "policy", "user", "train", "ttl_s"),
    *("metadata", "lineage", "sampling"),
)
PATHS: dict[str, Any] = {
    CHAT_PATH: CHAT,
    "/sessions": SESSION,
    "/groups": st.builds(lambda known, size: known | {"size": size}, SESSION, st.integers(0, 3) | JSON),
    "/sessions/here/reward": optional("value", "turn_id", "key", "source"),
    "/sessions/here/finish": optional("status", "reward", "reason"),
}


@pytest.mark.parametrize("path", PATHS)
def test_no_body_makes_a_500(door: Door, path: str) -> None:
    door.session(session_id="here")

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(PATHS[path])
    def holds(body: Any) -> None:
        reply = door.call(
            "POST", path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert reply.status_code in (200, 201, 400, 404, 409), (reply.status_code, body)
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    holds()


def said(**fields: str) -> str:
    """A call's body, whose other fields are JSON text."""
    return (
        ", ".join(
            ['{"messages": [{"role": "user", "content": "x"}]', *(f'"{n}": {v}' for n, v in fields.items())]
        )
        + "}"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, '{"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}'),
        (CHAT_PATH, '{"messages": ' + "[" * 100_000),
        (CHAT_PATH, said(seed=str(2**63))),
        (CHAT_PATH, said(model=f'"policy@{"9" * 5000}"')),
        ("/sessions", '{"metadata": {"a": 18446744073709551616}}'),
        ("/sessions", '{"metadata": {"a": "\\ud800"}}'),
        ("/sessions", '{"metadata": ' + '{"a":' * 5000 + "1" + "}" * 5001),
        ("/sessions", '{"sampling": {"max_tokens": 18446744073709551616}}'),
    ],
)
def test_what_cannot_be_read_or_stored_is_400(door: Door, path: str, body: str) -> None:
    reply = door.call("POST", path, content=body.encode(), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_tool_call_whose_arguments_are_an_abyss_is_read_as_text(door: Door) -> None:
    call = {"function": {"name": "get", "arguments": "[" * 3000}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    reply = door.post(CHAT_PATH, {"messages": [{"role": "user", "content": "x"}, said]})
    assert reply.status_code in (200, 400)


@pytest.mark.parametrize("path", [CHAT_PATH, "/sessions", "/groups", "/sessions/here/reward"])
def test_a_body_of_another_kind_is_415_on_every_path(door: Door, path: str) -> None:
    reply = door.call("POST", path, content=b"<a/>", headers={"content-type": "text/xml"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize("key", ["sess-\xe9.\xe9", "sess-aGVyZQ.\xe9", "sess-", "sess-_w.x", "\xe9"])
def test_a_key_of_strange_letters_is_401(door: Door, key: str) -> None:
    reply = door.get("/v1/models", key=None, headers={b"authorization": b"Bearer " + key.encode("latin-1")})
    assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("path", [CHAT_PATH, "/sessions", "/groups", "/admin/policies"])
def test_a_body_over_the_limit_is_413_on_every_path(stage: Stage, door: Door, path: str) -> None:
    with stage.door(max_body_bytes=100) as small:
        reply = small.post(path, {"metadata": {"a": "x" * 200}}, key=ADMIN_KEY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")
        chunks = (b'{"metadata": ', b"[1]" * 50, b"}")
        reply = small.call(
            "POST", path, content=iter(chunks), headers={"content-type": "application/json"}, key=ADMIN_KEY
        )
        assert reply.status_code == 413
        assert small.post("/sessions", {}).status_code == 201
