"""The usage of every dialect says how many tokens of the prompt the engine had in its cache."""

import json
from typing import Any

import pytest

from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.running import RunningGateway

HI: Any = [{"role": "user", "content": "word " * 20}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "stream_options": {"include_usage": True}},
    "completions": {"prompt": "word " * 20, "stream_options": {"include_usage": True}},
    "responses": {"input": "word " * 20},
    "messages": {"messages": HI, "max_tokens": 9},
}


def usage_of(gateway: RunningGateway, path: str, stream: bool, **more: Any) -> dict[str, Any]:
    """The last usage that the reply tells."""
    body = BODIES[path] | {"stream": stream} | more
    if not stream:
        body.pop("stream_options", None)
    reply = gateway.post(f"/v1/{path}", body)
    assert reply.status_code == 200, reply.text
    if not stream:
        told: dict[str, Any] = reply.json()["usage"]
        return told
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    usages = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    last: dict[str, Any] = [usage for usage in usages if usage][-1]
    return last


def cached_of(path: str, usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and how many of them were cached."""
    if path == "messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    if path == "responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_usage_tells_what_the_engine_had_cached(gateway: RunningGateway, path: str, stream: bool) -> None:
    for said, told in ((7, 7), (0, 0), (None, 0), (10**6, None)):
        gateway.engine.cached_tokens = said
        prompt, cached = cached_of(path, usage_of(gateway, path, stream))
        assert prompt == len(gateway.engine.requests[-1]["input_ids"])
        assert cached == (prompt if told is None else told), said


def test_the_choices_of_one_prompt_count_it_once(gateway: RunningGateway) -> None:
    gateway.engine.cached_tokens = 7
    for path in ("chat/completions", "completions"):
        assert cached_of(path, usage_of(gateway, path, False, n=3))[1] == 7, path


def test_the_engine_that_began_the_answer_says_what_was_cached(gateway: RunningGateway) -> None:
    gateway.engine.script.extend(["one two three four", "one two three four"])
    gateway.engine.interruptions.append(Interruption(2, "abort"))
    gateway.engine.cached_tokens = 7
    prompt, cached = cached_of("responses", usage_of(gateway, "responses", True))
    assert len(gateway.engine.requests) == 2
    assert (prompt, cached) == (len(gateway.engine.requests[0]["input_ids"]), 7)
