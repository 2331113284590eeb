"""The whole system with the real SGLang and a tiny random model, once for all files of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.system.real_system import FORKING_ENGINE, System, running_system, system_settings
from tests.support.system.services_here import services_here

OPEN = ExitStack()
"""What ends with the last test of this folder. After it, a worker runs other tests for minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests first that start engines of their own: two at once are too many for a small machine."""
    first = ("test_demo.py", "test_other_stacks.py", "test_router_replay.py", "test_tinker.py")
    items.sort(key=lambda item: item.path.name not in first or item.path.parent.name != "system")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != item.path.parent:
        OPEN.close()


@pytest.fixture(scope="session")
def system(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> System:
    """The services run in this process, SGLang in its own ones."""
    settings = system_settings(tmp_path_factory.mktemp("system"), tiny_model)
    settings = settings.model_copy(update={"engine_python": FORKING_ENGINE})
    return System(OPEN.enter_context(services_here(settings)), settings)


@pytest.fixture(scope="module")
def stacked(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The stack of `weir up`, for tests that end its processes."""
    with running_system(system_settings(tmp_path_factory.mktemp("stacked"), tiny_model)) as system:
        yield system
