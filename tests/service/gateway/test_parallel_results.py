"""Results of parallel tool calls, which agents send in the order in which their tools finish."""

from itertools import permutations
from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get", "arguments": {{"key": "{key}"}}}}\n</tool_call>' for key in "abc"
)
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}
ORDERS = list(permutations(range(3)))


def in_chat(gateway: RunningGateway, path: str, order: tuple[int, ...]) -> Any:
    function = {"name": "get", "parameters": SCHEMA}
    body: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": "look"}]
    message = gateway.post(f"{path}/chat/completions", body | {"messages": messages}).json()
    answer = message["choices"][0]["message"]
    ids = [call["id"] for call in answer["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": ids[n], "content": f"result {n}"} for n in order]
    return gateway.post(f"{path}/chat/completions", body | {"messages": [*messages, answer, *results]})


def in_messages(gateway: RunningGateway, path: str, order: tuple[int, ...]) -> Any:
    body = {"max_tokens": 99, "tools": [{"name": "get", "input_schema": SCHEMA}]}
    messages: list[Any] = [{"role": "user", "content": "look"}]
    content = gateway.post(f"{path}/messages", body | {"messages": messages}).json()["content"]
    ids = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": ids[n], "content": f"result {n}"} for n in order]
    history = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    return gateway.post(f"{path}/messages", body | {"messages": history})


def in_responses(gateway: RunningGateway, path: str, order: tuple[int, ...]) -> Any:
    body = {"tools": [{"type": "function", "name": "get", "parameters": SCHEMA}]}
    said = gateway.post(f"{path}/responses", body | {"input": "look"}).json()
    ids = [item["call_id"] for item in said["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": ids[n], "output": f"result {n}"} for n in order]
    return gateway.post(f"{path}/responses", body | {"input": results, "previous_response_id": said["id"]})


@pytest.mark.parametrize("play", [in_chat, in_messages, in_responses])
def test_parallel_results_are_read_in_the_order_of_their_calls(gateway: RunningGateway, play: Any) -> None:
    prompts = []
    for order in ORDERS:
        gateway.engine.script.append(CALLS)
        session = gateway.session()
        reply = play(gateway, f"/sessions/{session['session_id']}/v1", order)
        assert reply.status_code == 200, reply.text
        assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends"]
        prompts.append(gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"]))
    assert len(set(prompts)) == 1
    positions = [prompts[0].index(f"result {number}") for number in range(3)]
    assert positions == sorted(positions)
