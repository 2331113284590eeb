"""A compressed body is what it was before, or it is refused; it never fills the memory."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_queue.http.body_limit import codings_of, decoded
from rollout_queue.http.errors import ApiError
from tests.support.hypothesis_profiles import examples

MIB = 2**20


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


def zstd_stream(body: bytes, checksum: bool = False) -> bytes:
    """A frame of a writer that does not know the size, in blocks."""
    packer = zstandard.ZstdCompressor(write_checksum=checksum).compressobj()
    half = len(body) // 2
    return packer.compress(body[:half]) + packer.flush(1) + packer.compress(body[half:]) + packer.flush()


FRAME = b"\x28\xb5\x2f\xfd"
SKIPPED = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
"""A frame of zstd that decoders skip."""
PACKED: dict[str, Sequence[Callable[[bytes], bytes]]] = {
    "gzip": (gzip.compress, lambda body: gzip.compress(body[:3]) + gzip.compress(body[3:], 0)),
    "x-gzip": (lambda body: gzip.compress(body, mtime=0),),
    "deflate": (zlib.compress, raw_deflate, lambda body: zlib.compress(body, 0)),
    "zstd": (
        zstandard.compress,
        zstd_stream,
        lambda body: zstd_stream(body, checksum=True),
        lambda body: zstandard.compress(body[:9]) + SKIPPED + zstd_stream(body[9:]) + SKIPPED,
        lambda body: zstandard.compress(body, 22),
    ),
}
WAYS = [(coding, pack) for coding, ways in PACKED.items() for pack in ways]
BODIES = st.binary(max_size=60) | st.sampled_from([bytes(3 * MIB), b"x" * 70_000, bytes(range(256)) * 999])


def plain(body: bytes, header: str, most_bytes: int = 8 * MIB) -> bytes:
    return asyncio.run(decoded(body, codings_of(header), most_bytes))


def status(body: bytes, header: str, most_bytes: int = 8 * MIB) -> int:
    with pytest.raises(ApiError) as refused:
        plain(body, header, most_bytes)
    return refused.value.status


@pytest.mark.hypothesis
@settings(max_examples=examples(100), deadline=None)
@given(BODIES, st.lists(st.sampled_from(WAYS), min_size=1, max_size=3), st.data())
def test_each_coding_and_each_list_of_them_is_read(
    body: bytes, ways: list[tuple[str, Callable[[bytes], bytes]]], data: st.DataObject
) -> None:
    packed, names = body, []
    for coding, pack in ways:
        packed = pack(packed)
        names += [coding, *data.draw(st.lists(st.sampled_from(["identity", "", " Identity "]), max_size=1))]
    header = data.draw(st.sampled_from([", ", ",", " ,\t"])).join(names)
    assert plain(packed, header) == body
    assert plain(packed, header.upper()) == body
    if len(body) > 1:
        assert status(packed, header, len(body) - 1) == 413


@pytest.mark.hypothesis
@settings(max_examples=examples(100), deadline=None)
@given(BODIES.filter(bool), st.sampled_from(WAYS), st.integers(0, 10**7), st.binary(min_size=1, max_size=9))
def test_a_broken_body_is_refused(
    body: bytes, way: tuple[str, Callable[[bytes], bytes]], cut: int, more: bytes
) -> None:
    coding, pack = way
    packed = pack(body)
    part = packed[: 1 + cut % (len(packed) - 1)]
    try:  # a body that ends between two members or frames is whole
        assert body.startswith(plain(part, coding))
    except ApiError:
        assert status(part, coding) == 400
    assert status(b"\xff" + packed, coding) == 400
    with pytest.raises(ApiError):
        plain(packed + b"\xff" + more, coding)


@pytest.mark.parametrize("pack", PACKED["zstd"])
def test_a_body_of_zstd_that_is_cut_within_a_frame_is_refused(pack: Callable[[bytes], bytes]) -> None:
    for body in (bytes(20), bytes(range(64)), b"abcd" * 40):
        packed = pack(body)
        frames = packed.count(FRAME) + packed.count(SKIPPED)
        ends = [end for end in range(1, len(packed) + 1) if decodes(packed[:end])]
        assert len(ends) == frames


def decodes(packed: bytes) -> bool:
    try:
        plain(packed, "zstd")
    except ApiError:
        return False
    return True


def test_a_coding_that_is_not_served_is_415_and_the_served_ones_are_named() -> None:
    for header in ("br", "gzip, br", "gzip;q=1", "*", ", ".join(["gzip"] * 5)):
        with pytest.raises(ApiError, match="gzip, deflate, zstd") as refused:
            codings_of(header)
        assert refused.value.status == 415
        assert refused.value.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert list(codings_of(" , identity,IDENTITY")) == []


BOMBS = {
    "gzip": gzip.compress(bytes(200 * MIB)),
    "deflate": zlib.compress(bytes(200 * MIB)),
    "zstd": zstandard.compress(bytes(200 * MIB)),
}
EMPTY_BLOCKS = b"\x00\x00\x00\xff\xff" * (20 * MIB // 5)


@pytest.mark.parametrize("header", [*BOMBS, *(f"{a}, {b}" for a, b in product(BOMBS, BOMBS))])
def test_a_bomb_is_413_and_takes_no_more_memory_than_a_body_may(header: str) -> None:
    first, _, second = header.partition(", ")
    bomb = PACKED[second][0](BOMBS[first]) if second else BOMBS[first]
    tracemalloc.start()
    try:
        assert status(bomb, header, 2 * MIB) == 413
        assert tracemalloc.get_traced_memory()[1] < 12 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("header", ["deflate, gzip", "gzip", "zstd"])
def test_a_long_body_that_says_nothing_is_refused(header: str) -> None:
    """It grows while it is decoded in the first case; in the others it has a great many parts."""
    body = {
        "deflate, gzip": gzip.compress(EMPTY_BLOCKS),
        "gzip": gzip.compress(b"") * 100_000,
        "zstd": SKIPPED * 100_000 + b"x",
    }[header]
    assert status(body, header, 4 * MIB) in (400, 413)


def test_other_calls_run_while_a_body_is_decoded() -> None:
    async def turns_of_others() -> int:
        work = asyncio.create_task(decoded(gzip.compress(bytes(64 * MIB)), ("gzip",), 64 * MIB))
        turns = 0
        while not work.done():
            await asyncio.sleep(0)  # the other calls
            turns += 1
        assert len(await work) == 64 * MIB
        return turns

    assert asyncio.run(turns_of_others()) > 64
