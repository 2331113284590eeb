"""Fixtures: a real gateway in front of an engine that answers what a test tells it, and the service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments.running import RunTest, running_gateway
from tests.support.fine_tuning.running import RunningJobs, fine_tuning


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[RunTest]:
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        yield running


@pytest.fixture
def service(running: RunTest, tmp_path: Path) -> Iterator[RunningJobs]:
    with fine_tuning(tmp_path / "jobs", running.url) as service:
        yield service
