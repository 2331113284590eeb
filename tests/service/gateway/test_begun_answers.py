"""A request may hold the beginning of the answer. The record's output is exactly the sampled continuation."""

from typing import Any

import pytest

from tests.support.gateway import streams
from tests.support.gateway.running import RunningGateway

ASKED: Any = {"role": "user", "content": "what is it?"}
BEGUN = "The answer  is"
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'
PATHS = ["chat/completions", "messages"]


def body_of(path: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    """A request without thinking, because this template drops even an empty thought at the next question."""
    own: dict[str, Any] = {"continue_final_message": True, "reasoning_effort": "none"}
    if path == "messages":
        own = {"max_tokens": 99, "thinking": {"type": "disabled"}}
    tool = {"name": "get", "input_schema": {"type": "object"}}
    if path != "messages":
        tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    if messages[-1]["role"] != "assistant":
        own.pop("continue_final_message", None)
    return {"messages": messages, "tools": [tool], **own, **more}


def text_of(path: str, reply: Any, stream: bool) -> str:
    """The text of a reply, whole or streamed."""
    if not stream:
        told = reply.json()
        if path == "messages":
            return "".join(block.get("text", "") for block in told["content"])
        return str(told["choices"][0]["message"]["content"] or "")
    return streams.text_of(reply.text.splitlines())[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rest", [" 42, I think", "", "  ", "n't 42\n", " 42" + CALL])
def test_the_answer_continues_the_begun_text_and_the_next_call_extends_it(
    gateway: RunningGateway, path: str, stream: bool, rest: str
) -> None:
    gateway.engine.script.extend([rest, "bye"])
    session = gateway.session()
    where = f"/sessions/{session['session_id']}/v1/{path}"
    begun = [ASKED, {"role": "assistant", "content": BEGUN}]
    reply = gateway.post(where, body_of(path, begun, stream=stream))
    assert reply.status_code == 200, reply.text
    said = text_of(path, reply, stream)
    assert said == rest.removesuffix(CALL).rstrip()
    (turn,) = gateway.turns(session)
    (asked,) = gateway.engine.requests
    decode = gateway.engine.tokenizer.decode
    assert decode(asked["input_ids"], skip_special_tokens=False).endswith(f"</think>\n\n{BEGUN}")
    assert asked["input_ids"] == turn["context_ids"]
    assert turn["output_ids"] == gateway.engine.tokenizer.encode(rest + "<|im_end|>").ids
    if CALL in rest:
        assert "tool" in turn["finish_reason"]
        return
    history = [ASKED, {"role": "assistant", "content": BEGUN + said}, {"role": "user", "content": "bye"}]
    assert gateway.post(where, body_of(path, history)).status_code == 200
    one, two = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert gateway.engine.requests[-1]["input_ids"] == (
        one["context_ids"] + one["output_ids"] + two["context_ids"]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_begun_answer_within_a_conversation_keeps_its_sampled_tokens(
    gateway: RunningGateway, path: str, stream: bool
) -> None:
    gateway.engine.script.extend(["one", " more"])
    session = gateway.session()
    where = f"/sessions/{session['session_id']}/v1/{path}"
    gateway.post(where, body_of(path, [ASKED]))
    history = [ASKED, {"role": "assistant", "content": "one"}, ASKED, {"role": "assistant", "content": BEGUN}]
    reply = gateway.post(where, body_of(path, history, stream=stream))
    assert text_of(path, reply, stream) == " more"
    one, two = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert gateway.engine.requests[-1]["input_ids"][: len(one["context_ids"] + one["output_ids"])] == (
        one["context_ids"] + one["output_ids"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_rest_and_not_the_beginning(gateway: RunningGateway, stream: bool) -> None:
    gateway.engine.script.append(" b STOP c")
    messages = [ASKED, {"role": "assistant", "content": "a STOP"}]
    body = body_of("messages", messages, stop_sequences=["STOP"], stream=stream)
    assert text_of("messages", gateway.post("/v1/messages", body), stream) == " b"


def test_a_begun_answer_begins_as_the_template_writes_it_with_thinking(gateway: RunningGateway) -> None:
    messages = [ASKED, {"role": "assistant", "content": BEGUN}]
    reply = gateway.post("/v1/messages", {"messages": messages, "max_tokens": 9})
    assert [block["type"] for block in reply.json()["content"]] == ["text"]
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    prompt = gateway.engine.tokenizer.decode(turn["context_ids"], skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{BEGUN}")


def test_a_begun_answer_is_counted_as_it_is_sampled(gateway: RunningGateway) -> None:
    messages = [ASKED, {"role": "assistant", "content": BEGUN}]
    body = body_of("messages", messages)
    count = gateway.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert gateway.post("/v1/messages", body).json()["usage"]["input_tokens"] == count
