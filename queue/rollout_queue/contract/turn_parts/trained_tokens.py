"""What a step used of a trained turn's tokens: the advantage of each, and the ratio of trainer to engine.

trainer ─ TrainedTokens ─ pack ─▶ field `n:{turn}` of the session's head ─ unpack ─▶ gateway

It is stored with the verdict `trained`, which names the step and the version. It is packed as one schema byte
and MessagePack of an array, little-endian like all packed numbers.
"""

import math
import struct
from typing import Self

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema

SCHEMA = 1
ADVANTAGE_BYTES, RATIO_BYTES = 4, 2


class TrainedTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The numbers of a turn's output tokens. Raises InvalidRecord if they are not as many as `tokens`."""

    tokens: int
    advantages: bytes | None = None
    """float32: one value if all tokens have the same, else one for each; None if none were recorded."""
    ratios: bytes | None = None
    """float16, one for each token: the probability under the weights before the step, divided by the
    engine's. NaN if the trainer's log-probability was not finite; at most 65504."""

    def __post_init__(self) -> None:
        advantages, ratios = self.advantages, self.ratios
        if self.tokens < 0:
            raise InvalidRecord(f"trained tokens: {self.tokens}")
        if advantages is not None and len(advantages) not in {ADVANTAGE_BYTES, ADVANTAGE_BYTES * self.tokens}:
            raise InvalidRecord(f"{len(advantages)} bytes of advantages for {self.tokens} trained tokens")
        if ratios is not None and len(ratios) != RATIO_BYTES * self.tokens:
            raise InvalidRecord(f"{len(ratios)} bytes of ratios for {self.tokens} trained tokens")

    @property
    def advantage_list(self) -> list[float] | None:
        """One advantage for each token."""
        if self.advantages is None:
            return None
        found = _floats(self.advantages, "f", ADVANTAGE_BYTES)
        return found * self.tokens if len(found) == 1 else found

    @property
    def advantage_mean(self) -> float | None:
        """The mean over the tokens; None without advantages."""
        if self.advantages is None:
            return None
        found = _floats(self.advantages, "f", ADVANTAGE_BYTES)
        return found[0] if len(found) == 1 else math.fsum(found) / len(found)

    @property
    def ratio_list(self) -> list[float | None] | None:
        """One ratio for each token; None in place of NaN, which JSON does not have."""
        if self.ratios is None:
            return None
        return [None if math.isnan(each) else each for each in _floats(self.ratios, "e", RATIO_BYTES)]

    def pack(self) -> bytes:
        return _SCHEMA_BYTE + _encoder.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises UnknownSchema for a record of a newer build, InvalidRecord for other content."""
        if packed[:1] != _SCHEMA_BYTE:
            raise UnknownSchema(f"trained tokens of schema {packed[:1]!r}; this build reads {SCHEMA}")
        try:
            return msgspec.msgpack.decode(packed[1:], type=cls)
        except msgspec.DecodeError as error:
            raise InvalidRecord(f"not trained tokens: {error}") from error


_SCHEMA_BYTE = bytes([SCHEMA])
_encoder = msgspec.msgpack.Encoder()


def _floats(packed: bytes, kind: str, size: int) -> list[float]:
    return list(struct.unpack(f"<{len(packed) // size}{kind}", packed))
