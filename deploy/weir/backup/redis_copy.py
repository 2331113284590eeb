"""Copies the keys of a deployment from a running Redis, all as they were at one moment.

SYNC ─▶ Redis forks ─▶ all its data, as a stream ─▶ RdbReader ─ our keys ─▶ redis.values, redis.index

redis.values   the values one after the other, each as DUMP returns it, so RESTORE takes it
redis.index    for each key its name, when it expires, and where its value is

In a backup the names of all keys begin with `weir:`, whatever the `redis_key_prefix` of the deployment.

By SYNC, which replicas use, Redis sends its data as they were when it forked. Calls go on meanwhile, and no
file of Redis is read, so Redis may run on any host, also behind TLS. The child process of Redis needs memory
for the pages that change while it writes.
"""

import mmap
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
from crcmod import mkCrcFun
from redis.exceptions import RedisError, ResponseError

from rollout_queue import clock
from rollout_queue.redis.redis_client import open_redis
from rollout_queue.redis.settings import RedisSettings, read_address
from weir.backup.point import MARK
from weir.backup.rdb import RdbReader
from weir.errors import StackError
from weir.stack.settings import redis_access

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
        """Write one key. `read(take)` calls `take` with each piece of the value."""
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


PREFIX = b"weir:"
"""What the names begin with in a backup."""
SILENCE_S = 60.0
"""How long Redis may send nothing. It sends a line every second while it forks and writes."""


class RedisNotCopied(StackError):
    """Redis did not send its data."""


class CopiedRedis(NamedTuple):
    """What was copied."""

    keys: int
    mark: bytes
    """The value of MARK in the copy."""
    version: int
    """The version of Redis' format."""
    server: str


def copy_redis(url: str, directory: Path, on_begin: Callable[[], None]) -> CopiedRedis:
    """Write the keys into `directory`. `on_begin` is called when Redis has copied its data and begins to
    send. Raises RedisNotCopied."""
    access = single_redis(url)
    client = open_redis(access, SILENCE_S, protocol=2)
    connection: Any = client.connection_pool.make_connection()
    try:
        about: Any = client.info("server")
        server = str(about["redis_version"])
        connection.connect()
        with suppress(ResponseError):  # before Redis 7: it also sends what is written later
            connection.send_command("REPLCONF", "rdb-only", "1")
            connection.read_response()
        connection.send_command("SYNC")
        # redis-py has no public way to read what is no reply. Nothing else is in its buffer now.
        stream: socket.socket = connection._sock
        with stream.makefile("rb", buffering=1 << 20) as source:
            _wait_for_data(source)
            on_begin()
            keys, mark, version = _written(
                RdbReader(source), directory, int(connection.db), own_prefix(access)
            )
        return CopiedRedis(keys, mark, version, server)
    except TimeoutError as error:
        raise RedisNotCopied(f"Redis sent nothing for {SILENCE_S:g} s; nothing was backed up") from error
    except (RedisError, OSError) as error:
        raise RedisNotCopied(f"Redis does not send its data: {error}") from error
    finally:
        connection.disconnect()
        client.close()


def single_redis(url: str) -> RedisSettings:
    """How the Redis at `url` is reached. Raises RedisNotCopied if it is a cluster."""
    access = redis_access(url)
    if read_address(access.redis_url).kind == "cluster":
        raise RedisNotCopied("weir backup and weir restore know no clusters: use the backup of the cluster")
    return access


def own_prefix(access: RedisSettings) -> bytes:
    """What the names of the deployment's keys begin with in Redis."""
    return f"{access.redis_key_prefix}:".encode()


def _wait_for_data(source: Any) -> None:
    """Read the empty lines that Redis sends while it prepares, and the line before its data."""
    began_at = clock.monotonic()
    while (line := source.readline()) == b"\n":
        continue
    if line.startswith(b"-"):
        raise RedisNotCopied(
            f"Redis refuses SYNC: {line[1:].decode(errors='replace').strip()}; its user needs the right to "
            "it, and "
            "some hosted servers allow it to nobody (then use their own backup)"
        )
    if not line.startswith(b"$"):
        raise RedisNotCopied(f"Redis ended the connection after {clock.monotonic() - began_at:.0f} s")


def _written(reader: RdbReader, directory: Path, database: int, own: bytes) -> tuple[int, bytes, int]:
    mark = b""
    with RecordWriter(directory, reader.version) as writer:
        for key in reader.each():
            name = PREFIX + key.name.removeprefix(own)
            if key.database != database or not key.name.startswith(own):
                reader.value(key.kind)
            elif name == MARK.encode():
                pieces: list[bytes] = []
                reader.value(key.kind, pieces.append)
                mark = b"".join(pieces)[1:]  # after the length, which is one byte
            else:
                writer.write(name, key.expires_ms, key.kind, partial(reader.value, key.kind))
        count = writer.count
    if not mark:
        raise RedisNotCopied("the copy of Redis lacks the mark of this backup: was Redis emptied meanwhile?")
    return count, mark, reader.version
