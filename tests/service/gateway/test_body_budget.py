"""The bytes of bodies that wait, and of decoded images, are bounded for each key."""

import json
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer

from gateway.language.image_decoding import png_of
from gateway.language.image_pads import vision_of
from rollout_queue.contract.ids import new_id
from tests.support.gateway.gated_engine import ANSWER, GatedEngine, asked, let_on
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.images import asking, data_url, encoded, image_of
from tests.support.waiting import wait_until

PER_KEY, HALF = 40_000, 25_000
"""Bytes: two bodies of `HALF` exceed the bound of a key, one does not."""
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "metadata": {"a": "x" * 15_000}}
LONG["messages"][0]["content"] += " " * (HALF - len(json.dumps(LONG)))


@pytest.fixture
def bounded(backends: Backends) -> Iterator[RunningGateway]:
    backends.clear(None)
    with backends.gateway(max_bodies_bytes_per_key=PER_KEY) as gateway:
        yield gateway


def refused(gateway: RunningGateway, key: str) -> bool:
    reply = gateway.post("/v1/chat/completions", LONG, key=key)
    return reply.status_code == 429 and str(reply.json()["error"]["code"]) == "bodies_limit"


class HalfSent:
    """A call of which all but the last byte of the body has been sent. The gateway holds the rest."""

    def __init__(self, gateway: RunningGateway, key: str) -> None:
        address = urlsplit(gateway.url)
        self._address = (str(address.hostname), int(address.port or 0))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: weir\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {HALF}\r\n\r\n"
        )
        self._sent = head.encode() + b" " * (HALF - 1)
        self._line = self._send()
        wait_until(lambda: refused(gateway, key) or self._again())

    def _send(self) -> socket.socket:
        line = socket.create_connection(self._address)
        line.sendall(self._sent)
        return line

    def _again(self) -> bool:
        """Send it again if it has an answer: it was refused itself, because the other call was held then."""
        if select.select([self._line], [], [], 0)[0]:
            self.close()
            self._line = self._send()
        return False

    def close(self) -> None:
        self._line.close()


def made(gateway: RunningGateway, name: str) -> str:
    """The secret of a new key."""
    reply = gateway.admin("POST", "/keys", {"name": name})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["api_key"])


def test_bodies_beyond_the_bound_of_a_key_are_refused_until_others_are_done(bounded: RunningGateway) -> None:
    with closing(HalfSent(bounded, CLIENT_KEY)):
        assert refused(bounded, CLIENT_KEY)
    wait_until(lambda: not refused(bounded, CLIENT_KEY))


def test_the_secrets_of_one_key_share_its_bound(bounded: RunningGateway) -> None:
    name = f"team-{new_id()}"
    first = made(bounded, name)
    second = bounded.admin("POST", f"/keys/{name}/rotate", {"keep_s": 600})
    assert second.status_code in (200, 201), second.text
    with closing(HalfSent(bounded, first)):
        assert refused(bounded, second.json()["api_key"])


def test_a_session_named_like_anothers_key_does_not_use_up_its_bound(bounded: RunningGateway) -> None:
    name = f"team-{new_id()}"
    victim = made(bounded, name)
    session = bounded.session(session_id=name)
    with closing(HalfSent(bounded, session["api_key"])):
        assert not refused(bounded, victim)


def test_a_body_that_never_fits_is_not_tried_again(bounded: RunningGateway) -> None:
    reply = bounded.chat("x" * (PER_KEY + 1))
    assert (reply.status_code, "retry-after" in reply.headers) == (413, False), reply.text


# Decoded images count until the answer is recorded, because they stay in memory until then

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PHOTOS = [encoded(image_of(256, 256, seed), "JPEG", quality=1) for seed in range(4)]
"""Much smaller than what they are decoded to."""
URLS = [data_url(photo, "image/jpeg") for photo in PHOTOS]

Bounded = Callable[[float], Any]


@pytest.fixture
def holding(backends: Backends, vision_model: Path, tokens: Tokenizer) -> Bounded:
    """Starts a gateway that holds so many decoded images at once for a key. Its engine stops in each answer
    until the test lets it continue."""
    vision = vision_of(vision_model)
    assert vision is not None
    png_bytes = max(len(png_of(photo, "", vision, 2**20, 2**20).data) for photo in PHOTOS)
    assert png_bytes > 4 * max(map(len, URLS)), "the test is about images, not about bodies"

    @contextmanager
    def start(images: float) -> Iterator[RunningGateway]:
        backends.clear(None)
        backends.engine = GatedEngine(tokens, stall_after=3)
        backends.engine.script.extend(list(ANSWER) for _ in range(20))
        limits = {"max_bodies_bytes_per_key": int(images * png_bytes)}
        with backends.ready_gateway(model_path=vision_model, **limits) as gateway:
            yield gateway

    return start


def ask(gateway: RunningGateway, *urls: str, **more: Any) -> Any:
    return gateway.post(CHAT, {"messages": [asking(*urls)], **more})


def code_of(reply: Any) -> tuple[int, str | None]:
    return reply.status_code, reply.json().get("error", {}).get("code")


@pytest.mark.parametrize("more", [{"stream": True}, {"n": 2}])
def test_images_count_while_the_answer_is_sampled_and_no_longer(
    holding: Bounded, more: dict[str, Any]
) -> None:
    with holding(1.5) as gateway, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, gateway, URLS[0], **more)
        asked(gateway, more.get("n", 1))
        assert code_of(ask(gateway, URLS[1])) == (429, "bodies_limit")
        let_on(gateway)
        assert gateway.refusals == {"bodies_limit": 1}
        assert first.result().status_code == 200
        for url in URLS:
            assert ask(gateway, url).status_code == 200


def test_images_of_an_answer_in_the_background_count_until_it_is_made(holding: Bounded) -> None:
    part = {"type": "input_image", "image_url": URLS[0]}
    with holding(1.5) as gateway:
        body = {"input": [{"role": "user", "content": [part]}], "background": True}
        reply = gateway.post(RESPONSES, body)
        assert reply.json()["status"] in ("queued", "in_progress")
        asked(gateway, 1)
        assert code_of(ask(gateway, URLS[1])) == (429, "bodies_limit")
        let_on(gateway)
        path = f"{RESPONSES}/{reply.json()['id']}"
        wait_until(lambda: gateway.get(path).json()["status"] == "completed")
        wait_until(lambda: ask(gateway, URLS[1]).status_code == 200)


def test_an_image_counts_once_and_a_call_that_never_fits_is_told_before_all_are_decoded(
    holding: Bounded,
) -> None:
    with holding(2.5) as gateway:
        let_on(gateway)
        broken = data_url(PHOTOS[3][:500], "image/jpeg")
        reply = ask(gateway, *URLS[:3], broken)
        assert (reply.status_code, "retry-after" in reply.headers) == (413, False), reply.text
        assert not gateway.engine.requests
        assert ask(gateway, *URLS[:2], URLS[0]).status_code == 200
