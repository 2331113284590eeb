"""The keys of Redis in a backup: one file of values, and an index of them.

redis.values   the values one after the other, each as DUMP returns it, so RESTORE takes it
redis.index    for each key its name, when it expires, and where its value is
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from crcmod import mkCrcFun

VALUES, INDEX = "redis.values", "redis.index"
LENGTH = struct.Struct(">I")
crc64: Callable[[bytes, int], int] = mkCrcFun(0x1AD93D23594C935A9, initCrc=0, xorOut=0, rev=True)
"""The checksum at the end of what DUMP returns (CRC-64/REDIS). The second argument is that of the bytes
before."""


class StoredKey(msgspec.Struct, frozen=True, array_like=True):
    """One key in the index."""

    name: bytes
    expires_ms: int | None
    offset: int
    size: int


class RecordWriter:
    """Writes keys. Memory holds one piece of a value at a time."""

    def __init__(self, directory: Path, version: int) -> None:
        """`version` is that of the data, which RESTORE compares with its own."""
        self._values = (directory / VALUES).open("wb", buffering=1 << 20)
        self._index = (directory / INDEX).open("wb", buffering=1 << 20)
        self._version = struct.pack("<H", version)
        self._offset = 0
        self.count = 0

    def write(
        self,
        name: bytes,
        expires_ms: int | None,
        kind: int,
        read: Callable[[Callable[[bytes], object]], object],
    ) -> None:
        """Write one key. `read` gives the bytes of its value to its argument."""
        size, check = 0, 0

        def keep(piece: bytes) -> None:
            nonlocal size, check
            self._values.write(piece)
            check = crc64(piece, check)
            size += len(piece)

        keep(bytes([kind]))
        read(keep)
        keep(self._version)
        self._values.write(struct.pack("<Q", check))
        size += 8
        self._add(StoredKey(name, expires_ms, self._offset, size))

    def _add(self, key: StoredKey) -> None:
        packed = msgspec.msgpack.encode(key)
        self._index.write(LENGTH.pack(len(packed)) + packed)
        self._offset += key.size
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._values.close()
        self._index.close()


def stored_keys(directory: Path) -> Iterator[StoredKey]:
    """Every key of a backup. The file must have been verified."""
    with (directory / INDEX).open("rb", buffering=1 << 20) as file:
        while size := file.read(LENGTH.size):
            yield msgspec.msgpack.decode(file.read(LENGTH.unpack(size)[0]), type=StoredKey)


class StoredValues:
    """The values of a backup, which the system reads from the disk as they are sent."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / VALUES).open("rb")
        empty = (directory / VALUES).stat().st_size == 0
        self._map = None if empty else mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def value(self, key: StoredKey) -> memoryview:
        assert self._map is not None  # noqa: S101 - a file with a key is not empty
        return memoryview(self._map)[key.offset : key.offset + key.size]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._map is not None:
            self._map.close()
        self._file.close()
