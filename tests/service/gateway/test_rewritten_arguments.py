"""Clients read a call's arguments and write them anew: without spaces, and 5 for 5.0, as JavaScript does."""

import json
from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}, "seconds": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]


def said(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get", "arguments": {arguments}}}\n</tool_call>'


def compact(text: str) -> str:
    """As JavaScript's JSON.stringify writes it."""

    def number(digits: str) -> float:
        return float(digits) if float(digits) % 1 else int(float(digits))

    parsed = json.loads(text, parse_float=number)
    return json.dumps(parsed, separators=(",", ":"), ensure_ascii=False)


def conversation(gateway: RunningGateway, sampled: str) -> list[str]:
    """A question with a call, then another question; the relation of each turn."""
    session = gateway.session()
    gateway.engine.script.extend([sampled, "done", "done again"])
    messages: list[Any] = [{"role": "user", "content": "look"}]

    def ask() -> dict[str, Any]:
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        reply = gateway.post(path, {"messages": messages, "tools": TOOLS})
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()["choices"][0]["message"]
        for call in answer.get("tool_calls", ()):
            call["function"]["arguments"] = compact(call["function"]["arguments"])
        messages.append(answer)
        return answer

    (call,) = ask()["tool_calls"]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    ask()
    messages.append({"role": "user", "content": "and again"})
    ask()
    return [turn["relation"] for turn in gateway.turns(session)]


@pytest.mark.parametrize("arguments", ['{"key": "a", "seconds": 5}', '{"key": "größer, {\\"a\\": 1}"}', "{}"])
def test_arguments_without_spaces_are_read_as_the_model_wrote_them(
    gateway: RunningGateway, arguments: str
) -> None:
    assert conversation(gateway, said(arguments)) == ["root", "extends", "extends"]


@pytest.mark.parametrize("number", ["5.0", "-0.0", "1e3", "[2.0, 0.5]"])
def test_a_whole_number_is_the_same_with_and_without_its_point(gateway: RunningGateway, number: str) -> None:
    relations = conversation(gateway, said(f'{{"key": "a", "seconds": {number}}}'))
    assert relations[:2] == ["root", "extends"]
    assert relations[2] in ("extends", "rerendered")


def test_text_that_is_no_object_stays_as_it_is(gateway: RunningGateway) -> None:
    """So the model reads the arguments as it wrote them."""
    history = [{"role": "user", "content": "look"}, called('{"key": '), result(), called("[1,2]"), result()]
    assert gateway.post("/v1/chat/completions", {"messages": history, "tools": TOOLS}).status_code == 200
    prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
    assert '"arguments": {"key": }' in prompt
    assert '"arguments": [1,2]}' in prompt


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "get", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": "x"}
