"""Which turn of a session a call continues: found on canonicalised messages, by chained digests.

digest of [m1, m2, m3] = H(H(H(H(tools), m1), m2), m3)      so a prefix's digest costs one step a message
a turn keeps the digest of its call's messages plus its own answer; a later call that begins with those
messages has that digest on its chain, whatever its client did to ids, key order or block content
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.render import Answer, ChatRenderer, Message, Tool, suffix_after
from rollout_queue.head import SessionHead
from rollout_queue.records import Relation, Turn
from rollout_queue.tokens import TokenIds


@dataclass(frozen=True)
class Prompt:
    """Where a call stands in its session's tree, and the ids that it adds there."""

    parent: Turn | None
    relation: Relation
    reason: str | None
    context_ids: TokenIds
    """What is new since the parent's end; the whole prompt for a turn without parent."""
    prompt_ids: TokenIds
    """Everything that the engine is given."""
    digest: bytes


def canonical(message: Message) -> bytes:
    """What a message means to the model, in one spelling, whatever a client stamped on it."""
    role, text = message["role"], text_of(message.get("content"))
    fields: list[Any] = ["system" if role == "developer" else role, text]
    if role == "assistant":
        # The answer left without its outer whitespace, and its tokens are in the record: nothing is lost.
        fields = [role, text.strip(), [_call(call) for call in message.get("tool_calls") or ()]]
    return msgspec.json.encode(fields, order="deterministic")


def text_of(content: Any) -> str:
    """The text of a message, given as a string, as text blocks, or as null."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in content or ())


def chain(tools: Sequence[Tool] | None, messages: Sequence[Message]) -> list[bytes]:
    """Digests of the empty conversation, of its first message, of its first two, …"""
    digests = [hashlib.sha256(msgspec.json.encode(tools or [], order="deterministic")).digest()]
    for message in messages:
        digests.append(extend(digests[-1], message))
    return digests


def extend(digest: bytes, message: Message) -> bytes:
    return hashlib.sha256(digest + canonical(message)).digest()


def reply_message(answer: Answer) -> Message:
    """The answer as the message that the client will send back."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def continuation_digests(messages: Sequence[Message], digests: Sequence[bytes]) -> list[str]:
    """The reply digests that a parent of this call could have, longest conversation first."""
    ends = (end for end in range(len(messages), 0, -1) if messages[end - 1]["role"] == "assistant")
    return [digests[end].hex() for end in ends]


def place(
    renderer: ChatRenderer, head: SessionHead, messages: Sequence[Message], tools: Sequence[Tool] | None
) -> Prompt:
    """Find the parent of a call and the ids that it adds: by the bridge, else by a full render."""
    digests = chain(tools, messages)
    by_reply = {turn.reply_digest: turn for turn in head.turns if turn.finish != "abort"}
    for end in range(len(messages) - 1, 0, -1):
        parent = by_reply.get(digests[end].hex())
        if parent is None or messages[end - 1]["role"] != "assistant":
            continue
        return _continue(renderer, head, parent, messages, end, tools, digests[-1])
    prompt_ids = renderer.render(messages, tools)
    if head.turns:
        return Prompt(
            None, "forks", "no turn of the session precedes it", prompt_ids, prompt_ids, digests[-1]
        )
    return Prompt(None, "root", None, prompt_ids, prompt_ids, digests[-1])


def _continue(
    renderer: ChatRenderer,
    head: SessionHead,
    parent: Turn,
    messages: Sequence[Message],
    end: int,
    tools: Sequence[Tool] | None,
    digest: bytes,
) -> Prompt:
    parent_prompt, parent_output = head.branch_ids(parent)
    before = parent_prompt + parent_output
    added = renderer.bridge(parent_prompt, parent_output, messages[end:], tools)
    if added is None:
        prompt_ids = renderer.render(messages, tools)
        added = suffix_after(before, prompt_ids)
        if added is None:
            reason = "the chat template renders its history anew"
            return Prompt(None, "rerendered", reason, prompt_ids, prompt_ids, digest)
    return Prompt(parent, "extends", None, added, TokenIds(before + added), digest)


def _call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # The model's own malformed call comes back as it was written.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [function.get("name"), arguments]
