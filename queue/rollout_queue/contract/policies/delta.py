"""The file that holds the changes of one weights file against the tensors of an earlier version, its *base*.

8 bytes: length of the header (little-endian) · DeltaHeader, JSON · one payload for each tensor, in order

A change is the bitwise XOR of a value's bits in both versions, taken as whole numbers. `same` has no payload,
`dense` is the tensor's bytes. `sparse` and `xor` are frames of zstandard: `sparse` has the distance of each
changed value to the one before it (uint32), then the changes; `xor` has the changes of all values, the lowest
byte of each value first, then all second bytes, and so on.
"""

from typing import Literal

import msgspec

DELTA_SUFFIX = ".delta"
Encoding = Literal["same", "dense", "sparse", "xor"]


class TensorChange(msgspec.Struct, frozen=True):
    """How one tensor is encoded, and how many bytes its payload has."""

    name: str
    encoding: Encoding
    size: int


class DeltaHeader(msgspec.Struct, frozen=True):
    """`header` is the text of the weights file's own header, without its length. The changes are in the order
    of the tensors' bytes in that file."""

    header: str
    changes: list[TensorChange]
