"""Anthropic's Messages API over HTTP."""

import json
from typing import Any

import httpx
import pytest

from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.running import RunningGateway

WEATHER = {"name": "weather", "description": "…", "input_schema": {"type": "object", "properties": {}}}


def ask(gateway: RunningGateway, messages: list[Any], path: str = "/v1/messages", **more: Any) -> Any:
    return gateway.post(path, {"model": "claude-x", "max_tokens": 64, "messages": messages, **more})


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; checks that each event's type is its name."""
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def test_a_message_is_answered_as_anthropics_clients_expect(gateway: RunningGateway) -> None:
    reply = ask(gateway, [{"role": "user", "content": "hi"}], system="be kind")
    body = reply.json()
    assert reply.status_code == 200
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "claude-x")
    assert body["content"] == [{"type": "text", "text": "hello"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    (turn,) = gateway.turns_of(reply)
    assert body["usage"]["output_tokens"] == turn["output_len"]
    assert body["usage"]["input_tokens"] == turn["context_len"]
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    prompt = gateway.engine.tokenizer.decode(turn["context_ids"], skip_special_tokens=False)
    assert "<|im_start|>system\nbe kind<|im_end|>" in prompt


def test_a_tool_loop_in_blocks_extends_the_first_turn(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/messages"
    gateway.engine.script.append(
        'let me see\n<tool_call>\n{"name": "weather", "arguments": {"b": 1, "a": "ü"}}\n</tool_call>'
    )
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "what is it like?"}]}]
    first = ask(gateway, history, path, tools=[WEATHER]).json()
    text, call = first["content"]
    assert text == {"type": "text", "text": "let me see"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"a": "ü", "b": 1})
    assert first["stop_reason"] == "tool_use"
    marked = {**call, "cache_control": {"type": "ephemeral"}}
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "sunny"}],
        "is_error": False,
    }
    history += [{"role": "assistant", "content": [text, marked]}, {"role": "user", "content": [result]}]
    second = ask(gateway, history, path, tools=[WEATHER]).json()
    assert second["content"] == [{"type": "text", "text": "hello"}]
    one, two = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert "sunny" in gateway.engine.tokenizer.decode(two["context_ids"])


def test_a_streamed_message_adds_up_to_the_plain_one(gateway: RunningGateway) -> None:
    script = "<think>\nhm\n</think>\n\nfirst this\n<tool_call>\n"
    script += '{"name": "weather", "arguments": {"a": [1]}}\n</tool_call>'
    gateway.engine.script += [script, script]
    messages = [{"role": "user", "content": "go"}]
    plain = ask(gateway, messages, tools=[WEATHER]).json()
    events = events_of(ask(gateway, messages, tools=[WEATHER], stream=True))
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            match delta["type"]:
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] += delta["signature"]
                case "text_delta":
                    block["text"] += delta["text"]
                case "input_json_delta":
                    block["json"] += delta["partial_json"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
            block["id"] = plain["content"][-1]["id"]  # two samples have different ids
        del block["json"]
    assert blocks == plain["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    ending = next(event for event in events if event["type"] == "message_delta")
    assert ending["delta"]["stop_reason"] == "tool_use"
    assert ending["usage"]["output_tokens"] == plain["usage"]["output_tokens"]
    starts = sum(kind == "content_block_start" for kind in kinds)
    assert starts == sum(kind == "content_block_stop" for kind in kinds) == 3


def test_a_stop_sequence_is_named(gateway: RunningGateway) -> None:
    gateway.engine.script.append("one STOP two")
    body = ask(gateway, [{"role": "user", "content": "count"}], stop_sequences=["STOP"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "STOP")
    assert body["content"] == [{"type": "text", "text": "one"}]


@pytest.mark.parametrize("arguments", ["[1, 2]", '{"at": "Zürich", "n": [1, 2]}'], ids=["list", "object"])
def test_a_call_that_comes_back_is_written_as_it_was_sampled(gateway: RunningGateway, arguments: str) -> None:
    """After a new question, the template renders the whole history, and still gives the recorded tokens."""
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/messages"
    gateway.engine.script.append(
        f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    )
    history: list[Any] = [{"role": "user", "content": "what is it like?"}]
    first = ask(gateway, history, path, tools=[WEATHER]).json()
    history.append({"role": "assistant", "content": first["content"]})
    result = {"type": "tool_result", "tool_use_id": "x", "content": "no"}
    for then in ("no, tell me of yourself", [result]):
        said = [*history, {"role": "user", "content": then}]
        assert ask(gateway, said, path, tools=[WEATHER]).status_code == 200, then
    one, two, three = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert three["parent_id"] == one["turn_id"]


def test_count_tokens_counts_the_prompt_that_a_call_would_have(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "how long is this?"}]
    said = gateway.post("/v1/messages/count_tokens", {"messages": messages, "tools": [WEATHER]}).json()
    asked = ask(gateway, messages, tools=[WEATHER]).json()
    assert said == {"input_tokens": asked["usage"]["input_tokens"]}
    assert len(gateway.engine.requests) == 1


def test_a_thread_is_refused_in_the_words_that_make_the_sdk_send_whole_histories(
    gateway: RunningGateway,
) -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = ask(gateway, [{"role": "user", "content": "and then?"}], path, thread=thread)
        assert (reply.status_code, reply.json()["type"]) == (400, "error"), path
        error = reply.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "thread")
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert not gateway.engine.requests


def test_an_output_format_holds_the_answer_to_its_schema(gateway: RunningGateway) -> None:
    schema = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
    form = {"type": "json_schema", "schema": schema}
    messages = [{"role": "user", "content": "a digit?"}]
    fields: list[dict[str, Any]] = [{"output_config": {"format": form}}, {"output_format": form}]
    for field in fields:
        gateway.engine.script.append('{"digit": 7}')
        reply = ask(gateway, messages, **field)
        assert reply.json()["content"] == [{"type": "text", "text": '{"digit": 7}'}], field
        tag = json.loads(gateway.engine.requests[-1]["sampling_params"]["structural_tag"])
        assert json.dumps(schema) in json.dumps(tag)
        (turn,) = gateway.turns_of(reply)
        assert turn["sampling"]["used"]["constraint"] == "json_schema"
    assert ask(gateway, messages, output_config={"effort": "low", "format": None}).status_code == 200
    assert "structural_tag" not in gateway.engine.requests[-1]["sampling_params"], "an effort alone"


def test_token_ids_come_on_request(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "hi"}]
    reply = ask(gateway, messages, return_token_ids=True)
    (turn,) = gateway.turns_of(reply)
    assert reply.json()["token_ids"] == turn["output_ids"]
    assert reply.json()["prompt_token_ids"] == turn["context_ids"]
    events = events_of(ask(gateway, messages, return_token_ids=True, stream=True))
    (ending,) = [event for event in events if event["type"] == "message_delta"]
    assert ending["prompt_token_ids"] == turn["context_ids"]
    assert len(ending["token_ids"]) == turn["output_len"]


THOUGHT = "<think>\nhm, 7\n</think>\n\nseven"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_signed_and_is_checked_when_it_comes_back(gateway: RunningGateway, stream: bool) -> None:
    gateway.engine.script.append(THOUGHT)
    path = f"/sessions/{gateway.session()['session_id']}/v1/messages"
    asked = [{"role": "user", "content": "what?"}]
    reply = ask(gateway, asked, path, stream=stream)
    if stream:
        deltas = [event["delta"] for event in events_of(reply) if event["type"] == "content_block_delta"]
        (signature,) = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
        assert [delta["type"] for delta in deltas].index("text_delta") > deltas.index(
            {"type": "signature_delta", "signature": signature}
        )
    else:
        signature = reply.json()["content"][0]["signature"]
    assert len(signature) >= 43  # 32 bytes in base64
    thought = {"type": "thinking", "thinking": "hm, 7", "signature": signature}
    text = {"type": "text", "text": "seven"}

    def again(thought: dict[str, Any]) -> Any:
        history = [
            *asked,
            {"role": "assistant", "content": [thought, text]},
            {"role": "user", "content": "sure?"},
        ]
        return ask(gateway, history, path)

    for forged in ({"thinking": "hm, 8"}, {"signature": signature[:-4] + "AAA="}, {"signature": 7}):
        refused = again(thought | forged)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[1].content[0].signature"
    assert again(thought).status_code == 200


# Thoughts that a client does not want to see: the signature carries them, and they come back

OMITTED = "The größte key is a."
LOOK = {"role": "user", "content": "look"}
GET = {"name": "get", "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}}}


def ask_omitted(gateway: RunningGateway, *then: Any, display: str | None = "omitted", **more: Any) -> Any:
    gateway.engine.script.append(f"<think>\n{OMITTED}\n</think>\n\n{CALL_TEXT}")
    thinking = {"type": "adaptive", "display": display}
    return ask(gateway, [LOOK, *then], tools=[GET], thinking=thinking, **more)


def continued(content: list[dict[str, Any]]) -> list[Any]:
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "found"}
    return [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


def test_a_thought_is_omitted_and_comes_back_whole(gateway: RunningGateway) -> None:
    content = ask_omitted(gateway).json()["content"]
    thought, call = content
    assert (thought["type"], thought["thinking"], call["type"]) == ("thinking", "", "tool_use")
    turns = gateway.turns_of(ask_omitted(gateway, *continued(content)))
    assert [turn["relation"] for turn in turns] == ["root", "extends"]
    elsewhere = f"/sessions/{gateway.session()['session_id']}/v1/messages"
    reply = ask(gateway, [LOOK, *continued(content)], elsewhere, tools=[GET])
    assert reply.status_code == 200, reply.text
    assert OMITTED in gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
    streamed = ask_omitted(gateway, stream=True).text
    assert "thinking_delta" not in streamed
    assert thought["signature"] in streamed


def test_a_carried_thought_that_was_changed_and_another_display_are_refused(gateway: RunningGateway) -> None:
    thought, call = ask_omitted(gateway).json()["content"]
    for forged in ("c2VjcmV0.VGhlIGtleSBpcyBiLg==", "x.y", "a.", ".", "ö.ö"):
        reply = ask_omitted(gateway, *continued([thought | {"signature": forged}, call]))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages[1].content[0].signature"), forged
    reply = ask_omitted(gateway, display="hidden")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking.display")
