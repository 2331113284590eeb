"""Fields of a request that are served, or accepted because they change nothing."""

from typing import Any

import pytest

from tests.support.gateway.running import RunningGateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": HI, "max_tokens": 9},
    "messages/count_tokens": {"messages": HI},
}
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (
        "chat/completions",
        {
            "store": True,
            "service_tier": "auto",
            "safety_identifier": "x",
            "prompt_cache_key": "x",
            "prompt_cache_retention": "24h",
            "prediction": {"type": "content", "content": "hello"},
            "modalities": ["text"],
            "verbosity": "medium",
            "functions": None,
            "continue_final_message": False,
            "add_generation_prompt": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "metadata": {"run": "x" * 512},
        },
    ),
    (
        "responses",
        {
            "truncation": "disabled",
            "background": False,
            "client_metadata": {"x-codex-installation-id": "x"},
            "service_tier": "auto",
            "prompt_cache_key": "x",
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "stream_options": {"include_obfuscation": False},
        },
    ),
    (
        "messages",
        {
            "cache_control": {"type": "ephemeral"},
            "service_tier": "auto",
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive"},
            "mcp_servers": [],
            "speed": "standard",
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), ACCEPTED)
def test_what_changes_no_token_is_accepted(
    gateway: RunningGateway, path: str, fields: dict[str, Any]
) -> None:
    for body in (BODIES[path], BODIES[path] | fields):
        assert gateway.post(f"/v1/{path}", body).status_code == 200
    plain, given = gateway.engine.requests
    assert given["input_ids"] == plain["input_ids"]


THINKING = [
    ("chat/completions", {"reasoning_effort": "none"}, False),
    ("chat/completions", {"reasoning_effort": "low"}, True),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, False),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ("responses", {"reasoning": {"effort": "none"}}, False),
    ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, True),
    ("messages", {"thinking": {"type": "disabled"}}, False),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, True),
]


@pytest.mark.parametrize(("path", "fields", "on"), THINKING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_turns_thinking_on_or_off_in_its_dialects_words(
    gateway: RunningGateway, path: str, fields: dict[str, Any], on: bool, stream: bool
) -> None:
    reply = gateway.post(f"/v1/{path}", BODIES[path] | fields | {"stream": stream})
    assert reply.status_code == 200, reply.text
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    prompt = gateway.engine.tokenizer.decode(turn["context_ids"], skip_special_tokens=False)
    assert prompt.endswith("</think>\n\n") is not on
    assert turn["sampling"]["used"]["thinking"] == {"enable_thinking": on}
    assert turn["sampling"]["asked"]["thinking"] == ("on" if on else "off")
    assert "thinking" not in gateway.engine.requests[0]["sampling_params"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [("chat/completions", {"verbosity": "low"}), ("responses", {"text": {"verbosity": "high"}})],
)
def test_the_models_one_verbosity_serves_all_and_the_turn_records_the_one_asked(
    gateway: RunningGateway, path: str, fields: dict[str, Any]
) -> None:
    reply = gateway.post(f"/v1/{path}", BODIES[path] | fields)
    assert reply.status_code == 200, reply.text
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert turn["sampling"]["asked"]["verbosity"] == fields.get("text", fields)["verbosity"]


def test_a_conversation_without_thinking_extends_and_is_counted_as_it_is_sampled(
    gateway: RunningGateway,
) -> None:
    off = {"thinking": {"type": "disabled"}}
    path = f"/sessions/{gateway.session()['session_id']}/v1/messages"
    said = gateway.post(path, BODIES["messages"] | off).json()
    history = [*HI, {"role": "assistant", "content": said["content"]}, *HI]
    body = {"messages": history, **off}
    count = gateway.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    reply = gateway.post(path, body | {"max_tokens": 9})
    turns = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert [turn["relation"] for turn in turns] == ["root", "extends"]
    assert reply.json()["usage"]["input_tokens"] == count


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"policy": "policy@x"}, "policy"),
        ({"metadata": {"a": "x" * 20_000}}, "metadata"),
        ({"lineage": "x" * 201}, "lineage"),
    ],
)
def test_a_session_that_no_call_could_use_is_not_opened(
    gateway: RunningGateway, body: dict[str, Any], param: str
) -> None:
    for path, more in (("/sessions", {}), ("/groups", {"size": 2})):
        reply = gateway.post(path, body | more)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
