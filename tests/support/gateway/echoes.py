"""Clients of five APIs that send each answer back as they received it, whole or joined from a stream."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.gateway.running import RunningGateway

TOOL = "get"
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}


@dataclass
class Heard:
    """What a client has read of one answer."""

    content: str = ""
    thought: str = ""
    calls: list[str] = field(default_factory=list)
    """The ids of the tool calls."""
    token_bytes: list[bytes] | None = None
    """Of each token; None if the API does not tell them."""
    reasoning_tokens: int = 0


def events_of(reply: Any) -> Iterator[dict[str, Any]]:
    for line in reply.text.split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield event


class ChatClient:
    path = "chat/completions"

    def __init__(self, thoughts: bool = False) -> None:
        self.history: list[Any] = [{"role": "user", "content": "look"}]
        self._thoughts = thoughts

    def body(self, stream: bool) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": TOOL, "parameters": SCHEMA}}]
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        shown = {"logprobs": True, "top_logprobs": 1, "stream": stream, **usage}
        return {"messages": self.history, "tools": tools, **shown}

    def given(self) -> list[Any]:
        """The arguments of all calls so far."""
        calls = [call for message in self.history for call in message.get("tool_calls") or ()]
        return [call["function"]["arguments"] for call in calls]

    def hear(self, reply: Any, stream: bool) -> Heard:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        logprobs: list[Any] = []
        if not stream:
            body = reply.json()
            message, usage = body["choices"][0]["message"], body["usage"]
            logprobs = body["choices"][0]["logprobs"]["content"]
        else:
            usage = {}
            for event in events_of(reply):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    logprobs += (choice["logprobs"] or {}).get("content") or []
                    delta = choice["delta"]
                    for name in ("content", "reasoning_content"):
                        if name in delta:
                            message[name] = message.get(name, "") + delta[name]
                    for call in delta.get("tool_calls") or ():
                        made = {key: value for key, value in call.items() if key != "index"}
                        message.setdefault("tool_calls", []).append(made)
        calls = message.get("tool_calls") or []
        thought = message.get("reasoning_content") or ""
        self.history.append(message)
        if not self._thoughts:
            message.pop("reasoning_content", None)
        for call in calls:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        if not calls:
            self.history.append({"role": "user", "content": "go on"})
        details = usage["completion_tokens_details"]
        return Heard(
            message["content"] or "",
            thought,
            [call["id"] for call in calls],
            [bytes(each["bytes"]) for each in logprobs],
            details["reasoning_tokens"],
        )


class MessagesClient:
    path = "messages"

    def __init__(self) -> None:
        self.history: list[Any] = [{"role": "user", "content": "look"}]

    def body(self, stream: bool) -> dict[str, Any]:
        tools = [{"name": TOOL, "input_schema": SCHEMA}]
        return {"messages": self.history, "tools": tools, "max_tokens": 500, "stream": stream}

    def given(self) -> list[Any]:
        answers = [message["content"] for message in self.history if message["role"] == "assistant"]
        return [block["input"] for blocks in answers for block in blocks if block["type"] == "tool_use"]

    def hear(self, reply: Any, stream: bool) -> Heard:
        blocks: list[Any] = []
        if stream:
            for event in events_of(reply):
                if event["type"] == "content_block_start":
                    blocks.append(event["content_block"])
                elif event["type"] == "content_block_delta":
                    _grow(blocks[event["index"]], event["delta"])
                elif event["type"] == "content_block_stop" and "json" in blocks[event["index"]]:
                    block = blocks[event["index"]]
                    block["input"] = json.loads(block.pop("json"))
        else:
            blocks = reply.json()["content"]
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each, "content": "ok"} for each in calls]
        self.history.append({"role": "assistant", "content": blocks})
        self.history.append({"role": "user", "content": results or "go on"})
        texts = {kind: "".join(b.get(kind, "") for b in blocks) for kind in ("text", "thinking")}
        return Heard(texts["text"], texts["thinking"], calls)


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["json"] = block.get("json", "") + delta["partial_json"]


class ResponsesClient:
    path = "responses"

    def __init__(self) -> None:
        self.history: list[Any] = [{"role": "user", "content": "look"}]

    def body(self, stream: bool) -> dict[str, Any]:
        tools = [{"type": "function", "name": TOOL, "parameters": SCHEMA}]
        include = ["message.output_text.logprobs"]
        return {"input": self.history, "tools": tools, "stream": stream, "include": include, "store": False}

    def given(self) -> list[Any]:
        return [item["arguments"] for item in self.history if item.get("type") == "function_call"]

    def hear(self, reply: Any, stream: bool) -> Heard:
        told, body = "", dict[str, Any]()
        if stream:
            for event in events_of(reply):
                told += event["delta"] if event["type"] == "response.output_text.delta" else ""
                body = event.get("response") or body
        else:
            body = reply.json()
        output = body["output"]
        texts = {
            kind: "".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
            for kind in ("message", "reasoning")
        }
        assert not stream or told == texts["message"]
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": each, "output": "ok"} for each in calls]
        self.history += [*output, *(results or [{"role": "user", "content": "go on"}])]
        parts = [part for item in output if item["type"] == "message" for part in item["content"]]
        shown = [bytes(each["bytes"]) for part in parts for each in part["logprobs"]] if parts else None
        reasoned = body["usage"]["output_tokens_details"]["reasoning_tokens"]
        return Heard(texts["message"], texts["reasoning"], calls, shown, reasoned)


class CompletionsClient:
    """It sends token ids back, because text would be encoded again."""

    path = "completions"

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self._more = prompt
        self.tokens: list[str] = []
        self.tops: list[dict[str, float]] = []

    def given(self) -> list[Any]:
        return []

    def body(self, stream: bool) -> dict[str, Any]:
        return {"prompt": self.prompt, "stream": stream, "logprobs": 2, "return_token_ids": True}

    def hear(self, reply: Any, stream: bool) -> Heard:
        chunks = list(events_of(reply)) if stream else [reply.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["text"] for choice in choices)
        logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        offsets = [offset for each in logprobs for offset in each["text_offset"]]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        self.tokens += [token for each in logprobs for token in each["tokens"]]
        self.tops += [top for each in logprobs for top in each["top_logprobs"]]
        assert len(offsets) == len(ids) == sum(len(each["tokens"]) for each in logprobs)
        assert offsets == sorted(offsets)
        assert not offsets or 0 <= offsets[0] <= offsets[-1] <= len(text)
        self.prompt = [*self.prompt, *ids, *self._more]
        return Heard(text)


class TokenClient:
    """It knows ids only."""

    path = "inference/v1/generate"

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self._more = prompt

    def given(self) -> list[Any]:
        return []

    def body(self, stream: bool) -> dict[str, Any]:
        return {"token_ids": self.prompt}

    def hear(self, reply: Any, stream: bool) -> Heard:
        ids = reply.json()["choices"][0]["token_ids"]
        self.prompt = [*self.prompt, *ids, *self._more]
        return Heard()


Client = ChatClient | MessagesClient | ResponsesClient | CompletionsClient | TokenClient


def ask(gateway: RunningGateway, session: str, client: Client, stream: bool, **more: Any) -> Heard:
    """One call of the client in a session; the client then adds its next message."""
    root = "" if client.path.startswith("inference") else "/v1"
    reply = gateway.post(f"/sessions/{session}{root}/{client.path}", client.body(stream) | more)
    assert reply.status_code == 200, reply.text
    return client.hear(reply, stream)
