"""What axe-core finds in a page, and whether the page is wider than the screen."""

from collections.abc import Iterable
from pathlib import Path

from playwright.sync_api import Page

from tests.support.page.browser import PHONE, WIDE, missing

LOOKS = [("light", WIDE), ("dark", WIDE), ("light", PHONE), ("dark", PHONE)]
AXE = Path(__file__).parents[3] / "run/page/axe/node_modules/axe-core/axe.min.js"
RULES = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map(
    (each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`)"""


def violations(page: Page) -> list[str]:
    """What axe-core finds. It is evaluated by the debugger, which the page's policy does not hold up."""
    if not AXE.exists():
        missing("no axe-core: make test-page installs it")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[str] = page.evaluate(RULES)
    return found


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the screen."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


BEYOND = """() => [...document.querySelectorAll("main *")]
    .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map((each) => `${each.tagName}.${each.getAttribute("class")}`).slice(0, 8)"""


def too_wide(page: Page, widths: Iterable[int]) -> dict[int, list[str]]:
    """The widths of a screen at which the page is wider, each with elements that reach beyond it. Curves
    follow a frame later."""
    found = {}
    for width in widths:
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        if overflow(page) > 0:
            found[width] = list(page.evaluate(BEYOND))
    return found
