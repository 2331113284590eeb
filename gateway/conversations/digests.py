"""What a conversation is known by: digests of its messages as the model reads them, chained.

digest of [m1, m2, m3] = H(H(H(m1), m2), m3), and beside it what system prompt and tools it has:
a prefix's digest costs one step a message, and two conversations can be compared part by part
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import takewhile
from typing import Any

import msgspec

from gateway.language.chat_messages import ROLES, Message, Tool, text_of

TALK, PART = 16, 8
"""Bytes of a digest: of the messages, of the system prompt, of the tools."""
SYSTEM = frozenset({"system", "developer"})
_JSON = msgspec.json.Encoder(order="deterministic")


class Digest(bytes):
    """The parts of a digest: 32 bytes, of the messages, the system prompt, and the tools."""

    @property
    def talk(self) -> bytes:
        return self[:TALK]

    @property
    def frame(self) -> bytes:
        """System prompt and tools."""
        return self[TALK:]

    @property
    def tools(self) -> bytes:
        return self[TALK + PART :]


def canonical(message: Message) -> bytes:
    """What a message means to the model, in one spelling, whatever a client stamped on it."""
    role, text = message["role"], text_of(message.get("content"))
    if role == "assistant":
        # The answer left without its outer whitespace, and its tokens are in the record: nothing is lost.
        return _JSON.encode([role, text.strip(), [_call(call) for call in message.get("tool_calls") or ()]])
    return _JSON.encode([ROLES.get(role, role), text])


def chain(tools: Sequence[Tool] | None, messages: Sequence[Message]) -> list[bytes]:
    """Digests of the empty conversation, of its first message, of its first two, …"""
    spoken = [canonical(message) for message in messages]
    systems = list(takewhile(lambda message: message["role"] in SYSTEM, messages))
    frame = _part(b"".join(spoken[: len(systems)])) + _part(_JSON.encode(tools or ()))
    talk = bytes(TALK)
    digests = [talk + frame]
    for words in spoken:
        talk = sha256(talk + words).digest()[:TALK]
        digests.append(talk + frame)
    return digests


def extend(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation that one more message joins."""
    return sha256(digest[:TALK] + canonical(message)).digest()[:TALK] + digest[TALK:]


def continuation_digests(messages: Sequence[Message], digests: Sequence[bytes]) -> list[str]:
    """The reply digests that a parent of this call could have, longest conversation first."""
    ends = (end for end in range(len(messages), 0, -1) if messages[end - 1]["role"] == "assistant")
    return [digests[end].hex() for end in ends]


def forget_parts() -> None:
    """Remember no system prompt and no tools any more."""
    _part.cache_clear()


@lru_cache(128)
def _part(data: bytes) -> bytes:
    """Of a system prompt or a list of tools: an agent sends the same ones in every call."""
    return sha256(data).digest()[:PART]


def _call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        # The model's own malformed call comes back as it was written.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return [function.get("name"), arguments]
