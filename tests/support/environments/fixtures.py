"""Fixtures: a real gateway in front of an engine that answers what a test tells it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments.running import RunTest, running_gateway


@pytest.fixture
def running(
    redis_url: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunTest]:
    """Runs draw no pictures, which take half a second each."""
    for name in ("draw", "draw_evaluations"):
        monkeypatch.setattr(f"environments.start_run.{name}", lambda path, *_: path.write_text("a picture"))
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        yield running
