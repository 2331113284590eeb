"""Fixtures of the tests of deploy/kubernetes: its overlays, rendered once."""

import functools
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support.kubernetes.pods import Pod, pods_of
from tests.support.kubernetes.rendered import OVERLAYS, Object, copied, rendered, why_not_rendered


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of deploy/kubernetes with keys."""
    if (reason := why_not_rendered()) is not None:
        pytest.skip(reason)
    return copied(tmp_path_factory.mktemp("manifests"))


@pytest.fixture(scope="session")
def overlays(manifests: Path) -> dict[str, list[Object]]:
    """The objects of each overlay. The demo's agent is in that of the demo."""
    found = {name: rendered(manifests / "overlays" / name) for name in OVERLAYS}
    found["cpu-demo"] += rendered(manifests / "demo-agent")
    return found


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def objects(overlays: dict[str, list[Object]], overlay: str) -> list[Object]:
    return overlays[overlay]


@pytest.fixture
def pods(objects: list[Object]) -> dict[str, Pod]:
    return pods_of(objects)


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """The library reads megabytes of definitions for each object."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr("kubernetes_validate.utils.schema_contents", read)
        yield
