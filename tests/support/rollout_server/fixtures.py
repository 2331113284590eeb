"""Fixtures: a rollout server with a fake engine behind it, and its HTTP interface in front."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rollout_server.harness import Harness, make_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A started server whose engine serves version 0."""
    async with make_harness(tmp_path).started() as harness:
        yield harness
