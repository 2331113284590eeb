"""The copy of Redis in a backup: on a real Redis, of each type of value, the bytes are those of DUMP."""

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.redis_clients import redis_at
from tests.support.redis_process import RedisProcess
from weir.backup.point import MARK
from weir.backup.rdb import RdbReader, RdbUnreadable, decompressed
from weir.backup.redis_copy import RedisNotCopied, StoredValues, copy_redis, stored_keys
from weir.backup.restore import clear, has_keys, write_keys


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start()
    process.client.set(MARK, "mark-7-")
    yield process
    process.close()


def strings(redis: Redis) -> None:
    for number in (1, -129, 70_000, 2**40):
        redis.set(f"weir:number:{number}", number)
    redis.set("weir:short", "text")
    redis.set("weir:empty", b"")
    redis.set("weir:compressed", b"ab" * 5000)
    redis.set("weir:random", os.urandom(70_000))
    redis.set("weir:large", os.urandom(3 << 20))
    redis.set("weir:expires", "soon", ex=1000)
    redis.set("weir:" + "name" * 30, "a name that Redis compresses")


def collections(redis: Redis) -> None:
    for count in (3, 2000):
        texts = {f"field{number}": os.urandom(20) for number in range(count)}
        redis.hset(f"weir:hash:{count}", mapping=texts)  # type: ignore[arg-type]
        redis.rpush(f"weir:list:{count}", *texts.values())
        redis.sadd(f"weir:set:{count}", *texts)
        redis.sadd(f"weir:numbers:{count}", *range(count))
        redis.zadd(f"weir:sorted:{count}", {name: number / 3 for number, name in enumerate(texts)})


def streams(redis: Redis) -> None:
    for number in range(500):
        redis.xadd("weir:stream", {"r": os.urandom(50), "n": number})
    redis.xgroup_create("weir:stream", "trainer", id="0")
    redis.xgroup_create("weir:stream", "other", id="$")
    redis.xreadgroup("trainer", "trainer-0", {"weir:stream": ">"}, count=300)
    redis.xreadgroup("trainer", "trainer-1", {"weir:stream": ">"}, count=20)
    redis.xadd("weir:stream_without_groups", {"a": "b"})
    redis.xgroup_create("weir:stream_of_nothing", "g", mkstream=True)


@pytest.mark.parametrize("fill", [strings, collections, streams])
def test_every_type_of_value_is_copied_as_dump_returns_it(
    process: RedisProcess, tmp_path: Path, fill: Callable[[Redis], None]
) -> None:
    fill(process.client)
    process.client.set("foreign", "left out")
    with redis_at(process.url.removesuffix("0") + "5") as other:
        fill(other)
        other.set("weir:of_another_database", "left out")
    copied = copy_redis(process.url, tmp_path, lambda: None)
    assert copied.mark == b"mark-7-"
    expected = {name: process.client.dump(name) for name in process.client.keys("weir:*")}
    del expected[MARK.encode()]
    with StoredValues(tmp_path) as values:
        found = {key.name: bytes(values.value(key)) for key in stored_keys(tmp_path)}
    assert found == expected
    assert copied.keys == len(expected)
    ends = {key.name: key.expires_ms for key in stored_keys(tmp_path) if key.expires_ms is not None}
    assert set(ends) == ({b"weir:expires"} if fill is strings else set())


def test_a_deployment_with_another_prefix_is_copied_and_restored_beside_others(
    process: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backup it has the usual names, so that it fits any prefix."""
    client: Any = process.client
    collections(client)
    usual = {name: client.dump(name) for name in client.keys("weir:*") if name != MARK.encode()}
    mine = {b"mine" + name.removeprefix(b"weir"): value for name, value in usual.items()}
    for name, value in mine.items():
        client.restore(name, 0, value)
    client.delete(*usual)
    client.mset({"mine:backup_mark": "mark-1-", "mine1:x": "a third one", "weir:x": "a neighbour"})
    monkeypatch.setenv("WEIR_REDIS_KEY_PREFIX", "mine")
    assert copy_redis(process.url, tmp_path, lambda: None).mark == b"mark-1-"
    assert {key.name for key in stored_keys(tmp_path)} == set(usual)
    with StoredValues(tmp_path) as values:
        for own in (b"mine:", b"theirs:"):
            clear(client, own)
            assert not has_keys(client, own)
            assert write_keys(client, own, tmp_path, values) == len(usual)
            assert has_keys(client, own)
    for prefix in (b"mine", b"theirs"):
        names = {name: prefix + name.removeprefix(b"weir") for name in usual}
        assert {name: client.dump(own) for name, own in names.items()} == usual
    assert client.mget("weir:x", "mine1:x") == [b"a neighbour", b"a third one"]


def test_a_server_that_refuses_to_send_its_data_is_told_in_a_sentence(
    process: RedisProcess, tmp_path: Path
) -> None:
    process.client.acl_setuser("default", commands=["-sync"], enabled=True)
    with pytest.raises(RedisNotCopied, match="refuses SYNC: NOPERM"):
        copy_redis(process.url, tmp_path, lambda: None)
    process.kill()
    with pytest.raises(RedisNotCopied, match="does not send its data"):
        copy_redis(process.url, tmp_path, lambda: None)


def values_in(stream: bytes) -> bytes:
    reader = RdbReader(io.BytesIO(stream))
    pieces: list[bytes] = []
    for key in reader.each():
        reader.value(key.kind, pieces.append)
    return b"".join(pieces)


def test_a_stream_of_data_that_is_cut_off_is_refused() -> None:
    whole = b"REDIS0009\xfe\x00\x00\x06weir:a\x05hello\xff12345678"
    for end in range(len(whole)):
        with pytest.raises(RdbUnreadable):
            values_in(whole[:end])
    assert values_in(whole) == b"\x05hello"


@pytest.mark.parametrize("strange", [b"\x06", b"\x63", b"\xf6"])
def test_what_no_known_redis_sends_is_refused(strange: bytes) -> None:
    with pytest.raises(RdbUnreadable):
        values_in(b"REDIS0011" + strange + b"\x01k\x01v\xff12345678")


def test_compressed_names_are_read() -> None:
    assert decompressed(b"\x01ab\x20\x01", 5) == b"ababa"
    with pytest.raises(RdbUnreadable):
        decompressed(b"\x01ab", 5)
