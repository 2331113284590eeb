"""Token ids and logprobs: arrays in memory, packed little-endian int32 and float32 on the wire."""

import math
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TypeAlias, cast

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
        return cast(Self, super().__new__(cls, "i", values))

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
        return cast(Self, super().__new__(cls, "f", values))

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


def pack(values: TokenIds | Logprobs) -> bytes:
    if not _SWAP:
        return values.tobytes()
    wire = values[:]
    wire.byteswap()
    return wire.tobytes()
