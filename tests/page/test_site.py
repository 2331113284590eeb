"""The built documentation for those who use a keyboard or a screen reader, in both themes and on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from tests.support.page.browser import Tab, missing
from tests.support.page.looks import LOOKS, overflow, violations
from tests.support.serving import serving

BUILT = Path(__file__).parents[2] / "run" / "site" / "built"
PAGES = (
    "",
    "docs/install/",
    "docs/tutorial/",
    "docs/client/",
    "docs/environments/",
    "docs/page/",
    "docs/training/",
    "docs/gateway/",
    "docs/coming_from/",
    "results/",
    "reference/settings/",
    "reference/rest/",
    "reference/python/",
)


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (BUILT / "index.html").exists():
        missing("the site is not built: make test-page builds it")
    with serving(Starlette(routes=[Mount("/", StaticFiles(directory=BUILT, html=True))])) as url:
        yield url


@pytest.mark.parametrize(("theme", "size"), LOOKS)
def test_axe_finds_nothing_in_the_main_pages(site: str, tab: Tab, theme: str, size: tuple[int, int]) -> None:
    page = tab(f"{site}/", None, size, theme == "dark").tab
    found = dict[str, list[str]]()
    for path in PAGES:
        page.goto(f"{site}/{path}")
        page.get_by_role("heading", level=1).first.wait_for()
        found[path] = violations(page)
        if (beyond := overflow(page)) > 0:
            found[path].append(f"{beyond} pixels wider than the screen")
    assert not {path: each for path, each in found.items() if each}
