"""Whatever the model writes as a tool call, the agent gets an answer and the turn is recorded."""

from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
ODD = {
    "half a surrogate pair in an argument": '{"name": "f", "arguments": {"x": "\\ud800"}}',
    "half a surrogate pair in the name": '{"name": "f\\ud800", "arguments": {"x": "1"}}',
    "half a surrogate pair in a key": '{"name": "f", "arguments": {"\\udc00": 1}}',
    "half a surrogate pair for arguments": '{"name": "f", "arguments": "\\ud83d"}',
    "no number": '{"name": "f", "arguments": {"x": NaN}}',
    "an abyss": '{"name": "f", "arguments": {"x": ' + "[" * 900 + "]" * 900 + "}}",
    "an abyss without bottom": '{"name": "f", "arguments": {"x": ' + "[" * 900 + "}}",
    "a number without end": '{"name": "f", "arguments": {"x": ' + "9" * 2000 + "}}",
    "no name": '{"name": null, "arguments": null}',
    "a number for a name": '{"name": 5, "arguments": [1]}',
    "no object": "[1]",
    "no JSON": "{",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
    },
    "messages": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4000,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
    },
    "responses": {
        "input": "x",
        "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_odd_call_is_no_error(gateway: RunningGateway, path: str, stream: bool) -> None:
    for odd, call in ODD.items():
        gateway.engine.script.append(f"<tool_call>\n{call}\n</tool_call>")
        session = gateway.session()
        body = {**BODIES[path], "stream": stream}
        reply = gateway.post(f"/sessions/{session['session_id']}/v1/{path}", body)
        assert reply.status_code == 200, (odd, reply.text)
        assert '"error":{' not in reply.text, odd
        assert len(gateway.turns(session)) == 1, odd


def test_a_call_that_is_refused_leaves_no_session_behind(gateway: RunningGateway) -> None:
    for stream in (False, True):
        assert gateway.chat("word " * 6000, stream=stream).status_code == 400
    assert gateway.get("/sessions").json()["data"] == []
