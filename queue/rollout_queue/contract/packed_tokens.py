"""Token ids and logprobs: arrays in memory, packed little-endian int32 and float32 on the wire.

TrainedTokens are what a step used of a trained turn's tokens: the advantage of each, and the ratio of trainer
to engine.

trainer ─ TrainedTokens ─ pack ─▶ field `n:{turn}` of the session's head ─ unpack ─▶ gateway

It is stored with the verdict `trained`, which names the step and the version. It is packed as one schema byte
and MessagePack of an array, little-endian like all packed numbers.
"""

import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import msgspec

from rollout_queue.contract.errors import InvalidRecord, UnknownSchema

_SWAP = sys.byteorder == "big"
_HIGHEST = 0 if _SWAP else 3

if TYPE_CHECKING:
    _Ints: TypeAlias = array[int]
    _Floats: TypeAlias = array[float]
else:
    _Ints = _Floats = array  # `array` is not generic at run time before Python 3.12


class TokenIds(_Ints):
    """Token ids, int32. Compares, slices and concatenates like the array it is."""

    def __new__(cls, values: Iterable[int] = ()) -> Self:
        return super().__new__(cls, "i", values)  # type: ignore[return-value] # the stub's is a plain array

    @property
    def natural(self) -> bool:
        """Whether no id is negative. This looks at the highest byte of each id only, which is fast."""
        return self.tobytes()[_HIGHEST::4].isascii()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ValueError when `packed` is not a whole number of int32."""
        ids = _Ints.__new__(cls, "i", packed)
        if _SWAP:
            ids.byteswap()
        return ids  # type: ignore[return-value] # the stub declares a plain array


class Logprobs(_Floats):
    """Natural-log probabilities, float32, one per sampled token."""

    def __new__(cls, values: Iterable[float] = ()) -> Self:
        return super().__new__(cls, "f", values)  # type: ignore[return-value] # the stub's is a plain array

    @property
    def finite(self) -> bool:
        """Whether no value is infinite or NaN. The values are looked at only if a highest byte is 0x7F or
        0xFF, which all such values have."""
        highest = self.tobytes()[_HIGHEST::4]
        return not (0x7F in highest or 0xFF in highest) or all(map(math.isfinite, self))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ValueError when `packed` is not a whole number of float32."""
        logprobs = _Floats.__new__(cls, "f", packed)
        if _SWAP:
            logprobs.byteswap()
        return logprobs  # type: ignore[return-value] # the stub declares a plain array


def _swapped(values: TokenIds | Logprobs) -> bytes:
    wire = values[:]
    wire.byteswap()
    return wire.tobytes()


pack = _swapped if _SWAP else cast(Callable[[TokenIds | Logprobs], bytes], array.tobytes)
"""Their bytes on the wire; msgspec's `enc_hook`, too."""


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
