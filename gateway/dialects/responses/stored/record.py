"""The record of one response in Redis."""

from hashlib import sha1, sha256

import msgspec

from gateway.dialects.responses.wire import Item
from gateway.dialects.wire import JsonObject, encode
from gateway.language.chat_messages import Message

IN_PROGRESS = "in_progress"
"""The status of a response whose answer is being made in the background."""
SHARED = ("instructions", "tools", "text", "tool_choice", "reasoning", "metadata")
"""Fields that most responses of a conversation repeat."""


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one response in Redis."""

    owner: str
    session_id: str
    messages: list[Message]
    """The messages that its call added, without `instructions`, which apply to one call only."""
    output: list[Item]
    length: int
    """The number of messages of the whole conversation, with the answer."""
    instructed: bool = False
    before: list[str] = []
    """Ids of the responses that it continues, oldest first."""
    told: JsonObject = {}
    """The response's other fields, as the client got them; without token ids, which the turn's record has."""
    shared_digest: bytes = b""
    """Identifies the values of the fields in `SHARED`."""
    shared_from: str = ""
    """The id of the earlier response that stores these fields; empty if `told` has them."""

    @property
    def status(self) -> str:
        return str(self.told.get("status", "completed"))

    @property
    def fingerprint(self) -> str:
        """Identifies the record: Redis replaces it only if it is still the same."""
        return sha1(packed(self), usedforsecurity=False).hexdigest()


def packed(record: StoredResponse) -> bytes:
    """As msgpack; as JSON where a client gave a number of more than 64 bits, which msgpack does not have."""
    try:
        return msgspec.msgpack.encode(record)
    except OverflowError:
        return encode(record)


def unpacked(stored: bytes) -> StoredResponse:
    """The record of which `packed` made these bytes. Raises msgspec.MsgspecError."""
    if stored.startswith(b"{"):  # no map of msgpack begins with this byte
        return msgspec.json.decode(stored, type=StoredResponse)
    return msgspec.msgpack.decode(stored, type=StoredResponse)


def digest_of(told: JsonObject) -> bytes:
    """Identifies the values of the fields in `SHARED`."""
    return sha256(encode([told[name] for name in SHARED])).digest()[:16]
