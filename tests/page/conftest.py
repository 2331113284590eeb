"""Fixtures of tests in a browser, which all have its mark."""

from pathlib import Path

import pytest

from tests.support.page.fixtures import (  # noqa: F401 - pytest finds them here
    backends,
    browser,
    gateway,
    gateway_url,
    page,
    shown,
    tab,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
