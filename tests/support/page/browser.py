"""A real browser: the distribution's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

VARIABLE = "WEIR_TEST_CHROMIUM"
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
REQUIRED = "WEIR_TEST_BROWSER"
WIDE, PHONE = (1280, 860), (375, 740)
PATIENCE_MS = 60_000
"""How long the page may take to show something; the machine may be busy."""
WHY_NOT = f"no Chromium: apt-get install --no-install-recommends chromium, or name one in {VARIABLE}"


def missing(why: str) -> None:
    """Skip the test; fail it if WEIR_TEST_BROWSER is `required`."""
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(why)
    pytest.skip(why)


def chromium_executable() -> str | None:
    """The program that WEIR_TEST_CHROMIUM names, otherwise `chromium` on PATH."""
    return os.environ.get(VARIABLE) or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_executable(), args=OPTIONS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A tab, what its scripts complained about, and which hosts it asked."""

    tab: Page
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    expected: list[str] = field(default_factory=list)
    """Parts of complaints that the test causes."""

    def unexpected(self) -> list[str]:
        return [each for each in self.complaints if not any(part in each for part in self.expected)]

    def note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def note_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob"):
            self.hosts.add(address.netloc)


Tab = Callable[..., Watched]
"""Opens a tab at an address, and signs in: (url, key, size, dark)."""


def watched_tab(context: BrowserContext) -> Watched:
    """A new tab."""
    watched = Watched(context.new_page())
    watched.tab.set_default_timeout(PATIENCE_MS)
    watched.tab.on("console", watched.note_console)
    watched.tab.on("pageerror", lambda error: watched.complaints.append(f"error: {error}"))
    watched.tab.on("request", watched.note_request)
    return watched


def go(page: Page, place: str) -> Page:
    """Show another view."""
    page.evaluate("place => { location.hash = place }", place)
    return page


def context_of(browser: Browser, size: tuple[int, int] = WIDE, dark: bool = False) -> BrowserContext:
    return browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        locale="en-GB",
        timezone_id="UTC",
        reduced_motion="reduce",
    )
