"""The bytes of decoded images count until the answer is recorded, because they stay in memory until then."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.language.images.decoding import png_of
from gateway.language.images.vision import vision_of
from tests.support.gateway.gated_engine import ANSWER, GatedEngine, asked, let_on
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.images import asking, data_url, encoded, image_of
from tests.support.waiting import wait_until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PHOTOS = [encoded(image_of(256, 256, seed), "JPEG", quality=1) for seed in range(4)]
"""Much smaller than what they are decoded to."""
URLS = [data_url(photo, "image/jpeg") for photo in PHOTOS]

Bounded = Callable[[float], Any]


@pytest.fixture
def bounded(backends: Backends, vision_model: Path, tokens: Tokenizer) -> Bounded:
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
        with backends.gateway(model_path=vision_model, **limits) as gateway:
            yield gateway

    return start


def ask(gateway: RunningGateway, *urls: str, **more: Any) -> Any:
    return gateway.post(CHAT, {"messages": [asking(*urls)], **more})


def code_of(reply: Any) -> tuple[int, str | None]:
    return reply.status_code, reply.json().get("error", {}).get("code")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}])
def test_images_count_while_the_answer_is_sampled_and_no_longer(
    bounded: Bounded, more: dict[str, Any]
) -> None:
    with bounded(1.5) as gateway, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, gateway, URLS[0], **more)
        asked(gateway, more.get("n", 1))
        assert code_of(ask(gateway, URLS[1])) == (429, "bodies_limit")
        let_on(gateway)
        assert first.result().status_code == 200
        for url in URLS:
            assert ask(gateway, url).status_code == 200


def test_images_of_an_answer_in_the_background_count_until_it_is_made(bounded: Bounded) -> None:
    part = {"type": "input_image", "image_url": URLS[0]}
    with bounded(1.5) as gateway:
        body = {"input": [{"role": "user", "content": [part]}], "background": True}
        reply = gateway.post(RESPONSES, body)
        assert reply.json()["status"] in ("queued", "in_progress")
        asked(gateway, 1)
        assert code_of(ask(gateway, URLS[1])) == (429, "bodies_limit")
        let_on(gateway)
        path = f"{RESPONSES}/{reply.json()['id']}"
        wait_until(lambda: gateway.get(path).json()["status"] == "completed")
        wait_until(lambda: ask(gateway, URLS[1]).status_code == 200)


def test_an_image_that_is_shown_twice_counts_once(bounded: Bounded) -> None:
    with bounded(1.5) as gateway:
        let_on(gateway)
        assert ask(gateway, URLS[0], URLS[0]).status_code == 200


def test_a_call_whose_images_never_fit_is_told_so_before_all_are_decoded(bounded: Bounded) -> None:
    with bounded(2.5) as gateway:
        let_on(gateway)
        broken = data_url(PHOTOS[3][:500], "image/jpeg")
        reply = ask(gateway, *URLS[:3], broken)
        assert (reply.status_code, "retry-after" in reply.headers) == (413, False), reply.text
        assert not gateway.engine.requests
        assert ask(gateway, *URLS[:2]).status_code == 200
