"""Thoughts that a client of Messages does not want to see: the signature carries them, and they come back."""

from typing import Any

from tests.support.gateway.running import RunningGateway

THOUGHT = "The größte key is a."
ASKED = {"role": "user", "content": "look"}
TOOL = {"name": "get", "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'


def ask(gateway: RunningGateway, messages: list[Any], display: str | None = "omitted") -> Any:
    thinking = {"type": "adaptive", "display": display}
    body = {"max_tokens": 99, "messages": messages, "tools": [TOOL], "thinking": thinking}
    return gateway.post("/v1/messages", body)


def answer_of(gateway: RunningGateway) -> list[dict[str, Any]]:
    gateway.engine.script.append(f"<think>\n{THOUGHT}\n</think>\n\n{CALL}")
    reply = ask(gateway, [ASKED])
    assert reply.status_code == 200, reply.text
    content: list[dict[str, Any]] = reply.json()["content"]
    return content


def continued(content: list[dict[str, Any]]) -> list[Any]:
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "found"}
    return [ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]


def test_a_thought_is_omitted_and_comes_back_whole(gateway: RunningGateway) -> None:
    thought, call = answer_of(gateway)
    assert (thought["type"], thought["thinking"], call["type"]) == ("thinking", "", "tool_use")
    elsewhere = gateway.session()
    body = {"max_tokens": 9, "messages": continued([thought, call]), "tools": [TOOL]}
    reply = gateway.post(f"/sessions/{elsewhere['session_id']}/v1/messages", body)
    assert reply.status_code == 200, reply.text
    prompt = gateway.engine.tokenizer.decode(gateway.engine.requests[-1]["input_ids"])
    assert THOUGHT in prompt


def test_the_answer_extends_its_conversation(gateway: RunningGateway) -> None:
    content = answer_of(gateway)
    session_id = ask(gateway, continued(content)).headers["x-weir-session-id"]
    turns = gateway.turns({"session_id": session_id})
    assert [turn["relation"] for turn in turns] == ["root", "extends"]


def test_a_stream_has_only_the_signature_of_the_thought(gateway: RunningGateway) -> None:
    whole = answer_of(gateway)[0]
    gateway.engine.script.append(f"<think>\n{THOUGHT}\n</think>\n\n{CALL}")
    body = {"max_tokens": 99, "messages": [ASKED], "tools": [TOOL], "stream": True}
    shown = gateway.post("/v1/messages", body | {"thinking": {"type": "adaptive", "display": "omitted"}}).text
    assert "thinking_delta" not in shown
    assert whole["signature"] in shown


def test_a_carried_thought_that_was_changed_is_refused(gateway: RunningGateway) -> None:
    thought, call = answer_of(gateway)
    for forged in ("c2VjcmV0.VGhlIGtleSBpcyBiLg==", "x.y", "a.", ".", "ö.ö"):
        reply = ask(gateway, continued([thought | {"signature": forged}, call]))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages[1].content[0].signature"), forged


def test_another_display_is_refused_by_name(gateway: RunningGateway) -> None:
    reply = ask(gateway, [ASKED], display="hidden")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking.display")
