"""Identifies conversations by chained digests of their messages, as the model reads them.

digest of [m1, m2, m3] = H(H(H(m1), m2), m3), followed by a digest of the system prompt and one of the tools

The digests of all beginnings of a conversation cost one step per message, and the parts of a digest tell
which parts of two conversations are equal.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import takewhile
from typing import Any

import msgspec

from gateway.language.chat_messages import ROLES, Message, Tool, text_of

MESSAGES_BYTES, PART_BYTES = 16, 8
"""Of a digest's 32 bytes: the messages; the system prompt, and the tools."""
SYSTEM = frozenset({"system", "developer"})
_JSON = msgspec.json.Encoder(order="deterministic")


class Digest(bytes):
    """A digest of 32 bytes, and its parts."""

    @property
    def messages(self) -> bytes:
        return self[:MESSAGES_BYTES]

    @property
    def instructions(self) -> bytes:
        """The system prompt and the tools."""
        return self[MESSAGES_BYTES:]

    @property
    def tools(self) -> bytes:
        return self[MESSAGES_BYTES + PART_BYTES :]


def canonical(message: Message) -> bytes:
    """The same bytes for all messages that the model reads as the same, whatever other fields they have."""
    role, text = message["role"], text_of(message.get("content"))
    if role == "assistant":
        # Clients receive the answer without its outer whitespace. Its tokens are in the record.
        return _JSON.encode([role, text.strip(), [_call(call) for call in message.get("tool_calls") or ()]])
    return _JSON.encode([ROLES.get(role, role), text])


def chain(tools: Sequence[Tool] | None, messages: Sequence[Message]) -> list[bytes]:
    """The digests of the empty conversation, of its first message, of its first two messages, …"""
    encoded = [canonical(message) for message in messages]
    systems = list(takewhile(lambda message: message["role"] in SYSTEM, messages))
    instructions = _part(b"".join(encoded[: len(systems)])) + _part(_JSON.encode(tools or ()))
    chained = bytes(MESSAGES_BYTES)
    digests = [chained + instructions]
    for message_bytes in encoded:
        chained = sha256(chained + message_bytes).digest()[:MESSAGES_BYTES]
        digests.append(chained + instructions)
    return digests


def extend(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message."""
    return (
        sha256(digest[:MESSAGES_BYTES] + canonical(message)).digest()[:MESSAGES_BYTES]
        + digest[MESSAGES_BYTES:]
    )


def continuation_digests(messages: Sequence[Message], digests: Sequence[bytes]) -> list[str]:
    """The possible reply digests of the turn that a call continues, longest conversation first."""
    ends = (end for end in range(len(messages), 0, -1) if messages[end - 1]["role"] == "assistant")
    return [digests[end].hex() for end in ends]


def clear_digest_cache() -> None:
    """Forget the digests of system prompts and tools: their texts may have been deleted since."""
    _part.cache_clear()


@lru_cache(128)
def _part(data: bytes) -> bytes:
    """The digest of a system prompt or of a list of tools; cached, because agents send them in every call."""
    return sha256(data).digest()[:PART_BYTES]


def _call(call: Message) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # If the model wrote invalid JSON, the client sends it back unchanged.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [function.get("name"), arguments]
