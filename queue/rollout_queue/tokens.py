"""Packed token ids and logprobs: little-endian int32 and float32 on the wire, arrays in memory."""

import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self, TypeAlias, cast

_SWAP = sys.byteorder == "big"

if TYPE_CHECKING:
    _Ints: TypeAlias = array[int]
    _Floats: TypeAlias = array[float]
else:
    _Ints = _Floats = array  # not generic at run time before Python 3.12


class TokenIds(_Ints):
    """Token ids, int32. Compares, slices and concatenates like the array it is."""

    def __new__(cls, values: Iterable[int] = ()) -> Self:
        return cast(Self, super().__new__(cls, "i", values))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ValueError when `packed` is not a whole number of int32."""
        ids = cls()
        ids.frombytes(packed)
        if _SWAP:
            ids.byteswap()
        return ids


class Logprobs(_Floats):
    """Natural-log probabilities, float32, one per sampled token."""

    def __new__(cls, values: Iterable[float] = ()) -> Self:
        return cast(Self, super().__new__(cls, "f", values))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Raises ValueError when `packed` is not a whole number of float32."""
        logprobs = cls()
        logprobs.frombytes(packed)
        if _SWAP:
            logprobs.byteswap()
        return logprobs


def pack(values: TokenIds | Logprobs) -> bytes:
    wire = values[:]
    if _SWAP:
        wire.byteswap()
    return wire.tobytes()
