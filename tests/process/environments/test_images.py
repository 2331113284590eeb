"""An environment may show images: its observations are messages with data URLs, and its turns have them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments.running import RunTest, running_gateway
from tests.support.images import image_of, opened
from tests.support.tiny_vision_model import make_tiny_vision_model


@pytest.fixture
def seeing(redis_url: str, tmp_path: Path) -> Iterator[RunTest]:
    model = make_tiny_vision_model(tmp_path / "model")
    with running_gateway(redis_url, model, tmp_path) as running:
        yield running


async def test_the_model_sees_what_an_environment_shows(seeing: RunTest) -> None:
    seeing.engine.answer = lambda prompt: "noise"
    summary = await seeing.play("Picture", group_size=2, episodes=2, concurrency=1)
    assert summary["by_status"] == {"completed": 2}
    for session in seeing.sessions():
        one, two = session["turns"]
        assert (two["relation"], session["reward"]) == ("extends", 1.0)
        assert [len(turn["images"]) for turn in (one, two)] == [1, 1]
        assert one["images"][0]["sha256"] != two["images"][0]["sha256"]
    last = seeing.engine.requests[-1]["image_data"]
    shown = [opened(url).tobytes() for url in last]
    assert len(shown) == 2
    seeds = [seed for seed in range(20) if image_of(96, 64, seed).tobytes() in shown]
    assert len(seeds) == 2


async def test_a_text_model_ends_episodes_that_show_images(running: RunTest) -> None:
    summary = await running.play("Picture", group_size=1, episodes=1)
    assert summary["by_status"] == {"failed": 1}
