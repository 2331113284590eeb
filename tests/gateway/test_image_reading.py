"""Large images are read in threads, so that other calls go on meanwhile, and each is decoded once."""

import base64
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.language.images import decoding
from gateway.language.images.decoding import image_of
from tests.support.gateway.running import RunningGateway
from tests.support.images import asking, noise_url
from tests.support.waiting import PATIENCE_S

CHAT = "/v1/chat/completions"
WIDE = noise_url(96, 64, seed=1)


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
        monkeypatch.setattr(decoding, "base64", SimpleNamespace(b64decode=gate))
    else:
        gate = Gate(hashlib.sha256)
        monkeypatch.setattr(decoding, "sha256", gate)
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
    assert max(pieces) <= decoding.PIECE < len(data)


@pytest.mark.parametrize("wrong", ["AAA=", "A===", "AA A", "AAAé"])
def test_a_long_data_url_is_refused_wherever_it_is_malformed(wrong: str) -> None:
    piece = "A" * decoding.PIECE
    for text in (piece[:-4] + wrong + piece, piece + wrong + piece, piece + "AAA"):
        with pytest.raises(InvalidRequest, match="not base64"):
            image_of("data:image/png;base64," + text, "", len(text))
