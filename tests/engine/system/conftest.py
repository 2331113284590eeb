"""The whole system, started once for all tests: Redis, SGLang, gateway, DeepSpeed, a tiny random model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.system.real_system import System, system_settings
from weir.stack.stack import Stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests first that start engines of their own: two at once are too many for a small machine."""
    first = ("test_demo.py", "test_collective.py", "test_router_replay.py", "test_tinker.py")
    items.sort(key=lambda item: item.path.name not in first or item.path.parent.name != "system")


@pytest.fixture(scope="session")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = system_settings(tmp_path_factory.mktemp("system"), tiny_model)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        yield System(stack, settings)
