"""Fixtures: a real gateway in front of an engine that answers what a test tells it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments.running import RunTest, running_gateway


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[RunTest]:
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        yield running
