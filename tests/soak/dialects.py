"""The four dialects as an agent speaks them: a call's body, and the text and the end of its answer.

conversation ──body──▶ call ──gateway──▶ body or stream ──read──▶ text and id, or NotWhole
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


class NotWhole(Exception):
    """A stream ended without its last event, or contained an error."""


@dataclass
class Conversation:
    """What was said in one session, and the id of the last reply."""

    said: list[tuple[str, str]] = field(default_factory=list)
    """Role and text."""
    reply_id: str | None = None

    @property
    def messages(self) -> list[Json]:
        return [{"role": role, "content": text} for role, text in self.said]


@dataclass(frozen=True)
class SpokenDialect:
    """One dialect."""

    name: str
    path: str
    ask: Callable[[Conversation], Json]
    """The fields that hold the conversation."""
    limit: str
    """The field that bounds the answer's tokens."""
    text_of: Callable[[Json], str]
    """The text of a plain answer."""
    piece_of: Callable[[Json], str]
    """The text of one event of a stream."""
    ends: Callable[[Json], bool]
    """Whether an event is the last of a whole stream. Nobody asks for dialects that send `[DONE]`."""
    done: bool = False
    """Whether streams end with `[DONE]`."""

    def body(self, conversation: Conversation, tokens: int, stream: bool) -> Json:
        return {"model": "policy", self.limit: tokens, "stream": stream, **self.ask(conversation)}

    def read(self, raw: bytes, stream: bool) -> tuple[str, str]:
        """The text and the id of a whole answer. Raises NotWhole."""
        if not stream:
            body = json.loads(raw)
            return self.text_of(body), str(body["id"])
        text, reply_id, whole = "", "", False
        for event in events_of(raw):
            if event == "[DONE]":
                whole = True
                continue
            fields = json.loads(event)
            if fields.get("error"):
                raise NotWhole(event)
            inner = fields.get("response") or fields.get("message") or fields
            reply_id = reply_id or str(inner.get("id", ""))
            text += self.piece_of(fields)
            whole = whole or (not self.done and self.ends(fields))
        if not whole:
            raise NotWhole(raw[-300:].decode(errors="replace"))
        return text, reply_id


def events_of(raw: bytes) -> Iterator[str]:
    for line in raw.decode().splitlines():
        if line.startswith("data: "):
            yield line[6:]


def _delta(event: Mapping[str, Any]) -> str:
    return "".join((choice["delta"].get("content") or "") for choice in event["choices"])


def _next_input(conversation: Conversation) -> Json:
    """Responses needs only the new message, because the gateway has stored the earlier ones."""
    return {"input": conversation.said[-1][1], "previous_response_id": conversation.reply_id}


def _transcript(conversation: Conversation) -> Json:
    return {"prompt": "".join(f"{role}: {text}\n" for role, text in conversation.said) + "next\n"}


CHAT = SpokenDialect(
    "chat",
    "/v1/chat/completions",
    lambda conversation: {"messages": conversation.messages},
    "max_tokens",
    lambda body: body["choices"][0]["message"]["content"],
    _delta,
    lambda _: False,
    done=True,
)
COMPLETIONS = SpokenDialect(
    "completions",
    "/v1/completions",
    _transcript,
    "max_tokens",
    lambda body: body["choices"][0]["text"],
    lambda event: "".join(choice["text"] for choice in event["choices"]),
    lambda _: False,
    done=True,
)
RESPONSES = SpokenDialect(
    "responses",
    "/v1/responses",
    _next_input,
    "max_output_tokens",
    lambda body: "".join(part["text"] for item in body["output"] for part in item["content"]),
    lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    lambda event: event["type"] in ("response.completed", "response.incomplete"),
)
MESSAGES = SpokenDialect(
    "messages",
    "/v1/messages",
    lambda conversation: {"messages": conversation.messages},
    "max_tokens",
    lambda body: "".join(part["text"] for part in body["content"]),
    lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
    lambda event: event["type"] == "message_stop",
)
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
