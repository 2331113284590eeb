"""`functions` and `function_call`, the older form of tools in chat requests."""

import json
from typing import Any

import pytest

from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.running import RunningGateway

FUNCTION: Any = {
    "name": "get",
    "description": "Looks a key up.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}
OTHER: Any = {"name": "put", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": each} for each in (FUNCTION, OTHER)]
ASKED: Any = {"role": "user", "content": "value of a?"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_extends_the_conversation(
    gateway: RunningGateway, stream: bool
) -> None:
    gateway.engine.script.extend(["let me see" + CALL_TEXT, "seven"])
    session = gateway.session()
    client = gateway.client(session)
    arguments: Any = {"model": "m", "functions": [FUNCTION]}
    if stream:
        chunks = list(client.chat.completions.create(messages=[ASKED], stream=True, **arguments))
        choices = [chunk.choices[0] for chunk in chunks]
        content = "".join(choice.delta.content or "" for choice in choices)
        (call,) = [each.delta.function_call for each in choices if each.delta.function_call is not None]
        assert not any(choice.delta.tool_calls for choice in choices)
        finish = choices[-1].finish_reason
    else:
        (choice,) = client.chat.completions.create(messages=[ASKED], **arguments).choices
        content, call, finish = choice.message.content, choice.message.function_call, choice.finish_reason
        assert choice.message.tool_calls is None
    assert (content, finish) == ("let me see", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get", {"key": "a"})
    history: Any = [
        ASKED,
        {"role": "assistant", "content": content, "function_call": call.to_dict()},
        {"role": "function", "name": "get", "content": "a = 7"},
    ]
    (choice,) = client.chat.completions.create(messages=history, **arguments).choices
    assert (choice.message.content, choice.finish_reason) == ("seven", "stop")
    one, two = gateway.turns(session)
    assert one["finish_reason"] == "tool_calls"
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert "a = 7" in gateway.engine.tokenizer.decode(two["context_ids"])


PUT: Any = {"name": "put"}
CHOICES: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"function_call": "auto"}, {"tool_choice": "auto"}),
    ({"function_call": "none"}, {"tool_choice": "none"}),
    ({"function_call": PUT}, {"tool_choice": {"type": "function", "function": PUT}}),
]


def test_functions_are_read_as_tools_of_which_one_may_be_called(gateway: RunningGateway) -> None:
    for older, newer in CHOICES:
        assert gateway.chat(functions=[FUNCTION, OTHER], **older).status_code == 200
        assert gateway.chat(tools=TOOLS, parallel_tool_calls=False, **newer).status_code == 200
        one, two = gateway.engine.requests[-2:]
        assert one["input_ids"] == two["input_ids"], older
        assert one["sampling_params"] == two["sampling_params"], older


def test_a_history_of_function_calls_reads_like_one_of_tool_calls(gateway: RunningGateway) -> None:
    call = {"name": "get", "arguments": '{"key": "a"}'}
    made = {"tool_calls": [{"id": "c", "type": "function", "function": call}]}
    asked = {"role": "assistant", "content": None}
    for history in (
        [asked | {"function_call": call}, {"role": "function", "name": "get", "content": "7"}],
        [asked | made, {"role": "tool", "tool_call_id": "c", "content": "7"}],
    ):
        assert gateway.post("/v1/chat/completions", {"messages": [ASKED, *history]}).status_code == 200
    one, two = gateway.engine.requests
    assert one["input_ids"] == two["input_ids"]
