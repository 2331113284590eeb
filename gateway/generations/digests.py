"""Identifies conversations by chained digests of what the model reads of their messages.

digest of [m1, m2, m3] = H(H(H(m1), m2), m3), followed by a digest of the system prompt and one of the tools

So the digests of all beginnings of a conversation cost one hash per message. The parts of two digests tell
which parts of the two conversations are equal.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from itertools import takewhile
from typing import Any

import msgspec

from gateway.language.chat_messages import ROLES, Message, Tool, given_arguments, text_of
from gateway.language.image_pads import has_image

MESSAGES_BYTES, PART_BYTES = 16, 8
"""A digest has 16 bytes for the messages, 8 for the system prompt, and 8 for the tools."""
SYSTEM = frozenset({"system", "developer"})
_JSON = msgspec.json.Encoder(order="deterministic")
LARGEST_EXACT = 2**53
"""JavaScript writes a whole number below this bound as an integer."""


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
    """Encode what the model reads of a message. Fields that it does not read change nothing."""
    role, content = message["role"], message.get("content")
    text = content if isinstance(content, str) else text_of(content)
    if isinstance(content, list) and has_image(content):
        return _JSON.encode([ROLES.get(role, role), text, _shown(content)])
    if role == "assistant":
        # Clients receive the answer without its outer whitespace, so they send it back without.
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
    """The digests of a call's beginnings that end with an answer, the longest first.

    The turn that the call continues has one of them as its `reply_digest`.
    """
    ends = (end for end in range(len(messages), 0, -1) if messages[end - 1]["role"] == "assistant")
    return [digests[end].hex() for end in ends]


def clear_digest_cache() -> None:
    """Empty the cache of system prompts and tools, because their sessions may have been deleted."""
    _part.cache_clear()


@lru_cache(128)
def _part(data: bytes) -> bytes:
    """The digest of a system prompt or of a list of tools; cached, because agents send them in every call."""
    return sha256(data).digest()[:PART_BYTES]


def _shown(content: Sequence[Any]) -> list[Any]:
    """The images of a message, and how many characters of its text come before each."""
    shown: list[Any] = []
    characters = 0
    for part in content:
        if has_image([part]):
            shown.append([characters, part["sha256"]])
        else:
            characters += len(text_of([part]))
    return shown


def _call(call: Message) -> list[Any]:
    function = call.get("function") or {}
    arguments = given_arguments(function.get("arguments"))
    if isinstance(arguments, str):
        # Invalid JSON stays a text: the client sends it back as the model wrote it.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = _ARGUMENTS.decode(arguments)
    return [function.get("name"), arguments]


def _number(digits: str) -> float:
    """The number; an integer if it is whole, because many clients read 5.0 and write 5."""
    number = float(digits)
    return int(number) if number.is_integer() and abs(number) < LARGEST_EXACT else number


_ARGUMENTS = msgspec.json.Decoder(float_hook=_number)

NO_TOOLS = _part(_JSON.encode(()))
"""The part of a digest for a call without tools."""
