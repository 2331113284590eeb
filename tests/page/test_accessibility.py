"""The page for those who use a keyboard or a screen reader, in both themes and on a phone."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.support.gateway.running import Backends
from tests.support.page.browser import Tab, go
from tests.support.page.deployment import ShownDeployment, shown_deployment
from tests.support.page.looks import LOOKS, overflow, too_wide, violations
from tests.support.page.scene import fill


@pytest.fixture(scope="module")
def filled(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends) as shown:
        fill(shown)
        yield shown


@pytest.mark.parametrize(("theme", "size"), LOOKS)
def test_axe_finds_nothing_in_any_view(
    filled: ShownDeployment, tab: Tab, theme: str, size: tuple[int, int]
) -> None:
    signed_out = tab(filled.gateway.url, None, size, theme == "dark").tab
    signed_out.get_by_label("API key").wait_for()
    assert not violations(signed_out)
    page = tab(filled.gateway.url, size=size, dark=theme == "dark").tab
    expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
    assert not violations(page)
    assert overflow(page) <= 0
    page.get_by_role("link", name="Policies", exact=True).click()
    expect(page.get_by_role("heading", name="Last pushes")).to_be_visible()
    expect(page.get_by_role("heading", name="Canary of version 13")).to_be_visible()
    assert not violations(page)
    assert overflow(page) <= 0
    page.get_by_role("button", name="Roll back to version 11").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert not violations(page)


WIDTHS = (*range(320, 480, 16), *range(480, 1300, 41), 1000, 1001, 1099, 1100, 1440, 1920)
VIEWS = {"now": "table", "policies": "li .gate", "sessions": "table", "lineage": "table"}


def test_every_view_fits_at_every_width(filled: ShownDeployment, tab: Tab) -> None:
    page = tab(filled.gateway.url).tab
    for view, drawn in VIEWS.items():
        expect(go(page, f"#/{view}").locator(f"main {drawn}").first).to_be_visible()
        assert not too_wide(page, WIDTHS), view


def focused(page: Page) -> str:
    """The name of what has the focus."""
    name = "(each) => each.getAttribute('aria-label') || each.innerText || each.id || each.tagName"
    return str(page.evaluate(f"({name})(document.activeElement)")).strip()


def test_the_page_is_used_by_keyboard_alone(filled: ShownDeployment, tab: Tab) -> None:
    page = tab(filled.gateway.url, None).tab
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("admin-key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to content"
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        if focused(page) == "Policies":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Policies")).to_be_focused()
    expect(page.get_by_role("heading", name="Last pushes")).to_be_visible()
    for _ in range(60):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches(':focus-visible')")
        if focused(page) == "Roll back to version 11":
            break
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Roll back to version 11?")
    expect(dialog).to_be_visible()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert focused(page) == "Roll back to version 11", "the focus comes back"


def test_the_theme_is_switched_and_remembered(filled: ShownDeployment, tab: Tab) -> None:
    page = tab(filled.gateway.url).tab
    before = page.evaluate("getComputedStyle(document.body).color")
    page.get_by_role("button", name="Use the dark theme").click()
    assert page.evaluate("getComputedStyle(document.body).color") != before
    page.reload()
    expect(page.get_by_role("button", name="Use the light theme")).to_be_visible()
