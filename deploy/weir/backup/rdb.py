"""Reads the stream in which Redis sends all its data to a replica (RDB), one key after another.

A value in this stream has the bytes that DUMP returns and RESTORE takes, without their last ten. So a value
is not decoded: `RdbReader` only finds its end, and hands its bytes on as they arrive. Memory holds 1 MiB of
them, however large a value is. The format is that of `rdb.c`, versions 6 to 12.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from weir.errors import StackError

PIECE = 1 << 20
OPCODES = {
    "slots": 0xF4,
    "function": 0xF5,
    "aux_of_module": 0xF7,
    "idle": 0xF8,
    "frequency": 0xF9,
    "aux": 0xFA,
}
RESIZE, EXPIRES_MS, EXPIRES_S, SELECT, END = 0xFB, 0xFC, 0xFD, 0xFE, 0xFF
STRINGS_OF_ONE = {0, 9, 10, 11, 12, 13, 16, 17, 20}
"""Types whose value is one string: strings, and small collections in one block."""
COUNTED_STRINGS = {1: 1, 2: 1, 4: 2, 14: 1}
"""Types whose value is a count of items, and so many strings for each."""
STREAMS = {15: 1, 19: 2, 21: 3}
"""Types of streams, and the versions of their layout."""


class RdbUnreadable(StackError):
    """The stream is not RDB, or has something that this build does not know."""


class ByteSource(Protocol):
    """A buffered stream of bytes; `read` returns fewer only at the end."""

    def read(self, count: int, /) -> bytes: ...


class RdbKey(NamedTuple):
    """What comes before a value."""

    database: int
    name: bytes
    expires_ms: int | None
    """Unix time in milliseconds."""
    kind: int
    """The type of the value, in one byte: the first of what DUMP returns."""


class RdbReader:
    """Reads keys in the order in which they arrive. The value of each must be read before the next key."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._keep: Callable[[bytes], object] | None = None
        magic = self._take(9)
        if magic[:5] not in (b"REDIS", b"VALKE") or not magic[-3:].isdigit():
            raise RdbUnreadable(f"Redis sent {magic!r}, which is not the beginning of its data")
        self.version = int(magic[-4:] if magic[-4:].isdigit() else magic[-3:])

    def each(self) -> Iterator[RdbKey]:
        """Every key, until the end of the stream."""
        database, expires_ms = 0, None
        while (code := self._take(1)[0]) != END:
            if code == SELECT:
                database = self._length()
            elif code == RESIZE:
                self._length(), self._length()
            elif code == EXPIRES_MS:
                expires_ms = struct.unpack("<q", self._take(8))[0]
            elif code == EXPIRES_S:
                expires_ms = 1000 * struct.unpack("<i", self._take(4))[0]
            elif code in OPCODES.values():
                self._pass_over(code)
            else:
                yield RdbKey(database, self._string(), expires_ms, code)
                expires_ms = None
        self._take(8)  # the checksum

    def value(self, kind: int, keep: Callable[[bytes], object] | None = None) -> None:
        """Read the value of the key that was read last; `keep` gets its bytes in pieces."""
        self._keep = keep
        try:
            self._value(kind)
        finally:
            self._keep = None

    def _value(self, kind: int) -> None:
        if kind in STRINGS_OF_ONE:
            self._skip_string()
        elif kind in COUNTED_STRINGS:
            self._skip_strings(COUNTED_STRINGS[kind] * self._length())
        elif kind == 3:  # a sorted set with numbers as text
            for _ in range(self._length()):
                self._skip_string()
                size = self._take(1)[0]
                self._skip(size if size < 253 else 0)
        elif kind == 5:
            for _ in range(self._length()):
                self._skip_string()
                self._skip(8)
        elif kind == 7:
            self._length()
            self._skip_module()
        elif kind == 18:
            for _ in range(self._length()):
                self._length()
                self._skip_string()
        elif kind in STREAMS:
            self._skip_stream(STREAMS[kind])
        elif kind == 24:  # a hash whose fields expire
            self._skip(8)
            for _ in range(self._length()):
                self._length()
                self._skip_strings(2)
        elif kind == 25:
            self._skip(8)
            self._skip_string()
        else:
            raise RdbUnreadable(f"Redis sent a value of type {kind}, which this build does not know")

    def _skip_stream(self, version: int) -> None:
        self._skip_strings(2 * self._length())  # blocks of entries, each after its first id
        for _ in range(3 if version == 1 else 8):
            self._length()  # how many entries; the last, first and largest deleted id; how many were added
        for _ in range(self._length()):  # groups
            self._skip_string()
            for _ in range(2 if version == 1 else 3):
                self._length()
            for _ in range(self._length()):  # its pending entries
                self._skip(24)
                self._length()
            for _ in range(self._length()):  # its consumers
                self._skip_string()
                self._skip(8 if version < 3 else 16)
                self._skip(16 * self._length())

    def _skip_module(self) -> None:
        while code := self._length():
            if code in (1, 2):
                self._length()
            elif code in (3, 4):
                self._skip(4 if code == 3 else 8)
            elif code == 5:
                self._skip_string()
            else:
                raise RdbUnreadable(f"a module's value has the part {code}, which this build does not know")

    def _pass_over(self, code: int) -> None:
        """Skip what belongs to no key that is kept."""
        if code == OPCODES["aux"]:
            self._skip_strings(2)
        elif code == OPCODES["aux_of_module"]:
            self._length(), self._length(), self._length()
            self._skip_module()
        elif code == OPCODES["function"]:
            self._skip_string()
        elif code == OPCODES["frequency"]:
            self._skip(1)
        else:
            for _ in range(3 if code == OPCODES["slots"] else 1):
                self._length()

    def _length(self) -> int:
        found, special = self._length_or_encoding()
        if special:
            raise RdbUnreadable("Redis sent a text where its format has a count")
        return found

    def _length_or_encoding(self) -> tuple[int, bool]:
        """A length, or how a string is encoded."""
        first = self._take(1)[0]
        top, rest = first >> 6, first & 63
        if top == 0:
            return rest, False
        if top == 1:
            return rest << 8 | self._take(1)[0], False
        if top == 3:
            return rest, True
        if first not in (0x80, 0x81):
            raise RdbUnreadable(f"Redis sent a length of form {first:#x}, which this build does not know")
        size = 4 if first == 0x80 else 8
        return int.from_bytes(self._take(size), "big"), False

    def _skip_string(self) -> None:
        found, encoded = self._length_or_encoding()
        if not encoded:
            self._skip(found)
        elif found < 3:  # a whole number of 1, 2 or 4 bytes
            self._skip(1 << found)
        else:  # compressed
            packed, _ = self._length(), self._length()
            self._skip(packed)

    def _skip_strings(self, count: int) -> None:
        for _ in range(count):
            self._skip_string()

    def _string(self) -> bytes:
        """The name of a key. Redis does not compress those that Weir reads: they are compared only."""
        found, encoded = self._length_or_encoding()
        if not encoded:
            return self._take(found)
        if found < 3:
            return str(int.from_bytes(self._take(1 << found), "little", signed=True)).encode()
        packed, plain = self._length(), self._length()
        return decompressed(self._take(packed), plain)

    def _take(self, count: int) -> bytes:
        piece = self._source.read(count)
        if len(piece) != count:
            raise RdbUnreadable("Redis ended the connection before it had sent all of its data")
        if self._keep is not None:
            self._keep(piece)
        return piece

    def _skip(self, count: int) -> None:
        while count > 0:
            count -= len(self._take(min(count, PIECE)))


def decompressed(packed: bytes, size: int) -> bytes:
    """What LZF has compressed: runs of bytes, and copies of earlier ones."""
    plain = bytearray()
    at = 0
    while at < len(packed):
        control = packed[at]
        at += 1
        if control < 32:
            plain += packed[at : at + control + 1]
            at += control + 1
            continue
        count = control >> 5
        if count == 7:
            count += packed[at]
            at += 1
        start = len(plain) - ((control & 31) << 8) - packed[at] - 1
        at += 1
        for offset in range(count + 2):
            plain.append(plain[start + offset])
    if len(plain) != size:
        raise RdbUnreadable("Redis sent a compressed name that cannot be read")
    return bytes(plain)
