"""Large images are read in threads, so that other calls go on meanwhile, and each is decoded once."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.language import image_decoding, image_reading
from gateway.language.image_decoding import Png, image_of, png_of
from gateway.language.image_pads import vision_of
from gateway.language.image_reading import ImageReader, ReadImages, image_part
from gateway.settings import ImageSettings
from tests.support.gateway.running import RunningGateway
from tests.support.images import asking, noise_url
from tests.support.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
WIDE, TALL = noise_url(96, 64, seed=1), noise_url(64, 96, seed=2)


class Gate:
    """Stops a function until `let_on`."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        return self._function(*arguments, **options)


@pytest.fixture(params=["base64", "sha256"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    if request.param == "base64":
        gate = Gate(base64.b64decode)
        monkeypatch.setattr(image_decoding, "base64", SimpleNamespace(b64decode=gate))
    else:
        gate = Gate(hashlib.sha256)
        monkeypatch.setattr(image_decoding, "sha256", gate)
    yield gate
    gate.open.set()


def test_other_calls_are_answered_while_an_image_is_made_bytes(seeing: RunningGateway, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as pool:
        shows = pool.submit(seeing.post, CHAT, {"messages": [asking("look", WIDE)]})
        assert gate.entered.wait(PATIENCE_S)
        assert seeing.chat("hi").status_code == 200
        assert not shows.done()
        gate.open.set()
        assert shows.result().status_code == 200


def test_a_long_data_url_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 3000
    pieces: list[int] = []

    def counted(piece: str, validate: bool) -> bytes:
        pieces.append(len(piece))
        return decode(piece, validate=validate)

    decode = base64.b64decode
    monkeypatch.setattr(base64, "b64decode", counted)
    for end in (b"", b"1", b"12"):
        url = "data:image/png;base64," + base64.b64encode(data + end).decode()
        assert image_of(url, "", len(data) + 2).data == data + end
    assert max(pieces) <= image_decoding.PIECE < len(data)


def test_a_long_data_url_is_refused_wherever_it_is_malformed() -> None:
    piece = "A" * image_decoding.PIECE
    for wrong in ("AAA=", "A===", "AA A", "AAAé"):
        for text in (piece[:-4] + wrong + piece, piece + wrong + piece, piece + "AAA"):
            with pytest.raises(InvalidRequest, match="not base64"):
                image_of("data:image/png;base64," + text, "", len(text))


class Decoder:
    """Decodes images, but stops before it until `let_on`. It remembers the `where` of each."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.open = threading.Event()
        self.fails: dict[str, Exception] = {}
        """By the `where` that it is asked with."""

    def __call__(self, data: bytes, where: str, *bounds: Any) -> Png:
        self.began.append(where)
        assert self.open.wait(PATIENCE_S)
        if where in self.fails:
            raise self.fails[where]
        return png_of(data, where, *bounds)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoder]:
    decoder = Decoder()
    monkeypatch.setattr(image_reading, "png_of", decoder)
    yield decoder
    decoder.open.set()


class Reads:
    """Reads images, each for a call of its own."""

    def __init__(self, vision_model: Path) -> None:
        async def stored(_: Any) -> dict[str, bytes]:
            return {}

        self.reader = ImageReader(vision_of(vision_model), ImageSettings(), 1000, stored)

    def begin(self, url: str, where: str) -> asyncio.Task[ReadImages]:
        messages = [{"role": "user", "content": [image_part(url, where)]}]
        return asyncio.create_task(self.reader.read(messages, lambda _: None))

    async def all_have_come(self) -> None:
        """Returns when the calls that were begun wait for a decoder: one thread reads them in their order."""
        with pytest.raises(InvalidRequest, match="not base64"):
            await self.begin("data:image/png;base64,#", "")


@pytest.fixture
def reads(vision_model: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    monkeypatch.setattr(image_reading, "READERS", 1)
    reads = Reads(vision_model)
    yield reads
    decoder.open.set()
    reads.reader.close()


async def test_an_image_that_calls_show_at_once_is_decoded_once(decoder: Decoder, reads: Reads) -> None:
    group = [reads.begin(WIDE, f"{number}") for number in range(8)]
    await reads.all_have_come()
    decoder.open.set()
    read = await asyncio.gather(*group)
    assert decoder.began == ["0"]
    assert len({id(png) for each in read for png in each.pngs.values()}) == 1
    assert (await reads.begin(WIDE, "later")).pngs == read[0].pngs
    assert decoder.began == ["0"]


async def test_a_call_that_leaves_does_not_end_the_decode_of_the_others(
    decoder: Decoder, reads: Reads
) -> None:
    first, second, third = [reads.begin(WIDE, where) for where in "123"]
    await reads.all_have_come()
    for left in (first, third):
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    decoder.open.set()
    assert len((await second).pngs) == 1
    assert decoder.began == ["1"]


async def test_a_decode_that_fails_for_one_call_is_tried_by_the_others(
    decoder: Decoder, reads: Reads
) -> None:
    decoder.fails["1"] = InvalidRequest("the prompt has more tokens than the context holds")
    first, *others = [reads.begin(WIDE, where) for where in "123"]
    await reads.all_have_come()
    decoder.open.set()
    with pytest.raises(InvalidRequest, match="more tokens"):
        await first
    assert [len(each.pngs) for each in await asyncio.gather(*others)] == [1, 1]
    assert decoder.began == ["1", "2"]


async def test_an_image_that_all_calls_have_left_is_not_decoded(decoder: Decoder, reads: Reads) -> None:
    busy = [reads.begin(url, f"busy {url[-20:]}") for url in (WIDE, TALL)]
    left = [reads.begin(noise_url(seed=3), "left") for _ in range(2)]
    await reads.all_have_come()
    for each in left:
        each.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    decoder.open.set()
    await asyncio.gather(*busy, reads.begin(noise_url(seed=4), "later"))
    assert len(decoder.began) == image_reading.DECODERS + 1
    assert "left" not in decoder.began
