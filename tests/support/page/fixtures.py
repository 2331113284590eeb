"""Fixtures: a browser, and a gateway with doubles of its engine and its rollout servers, on a real Redis."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser
from tokenizers import Tokenizer

from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway, backends_in
from tests.support.page.browser import (
    WHY_NOT,
    WIDE,
    Tab,
    Watched,
    chromium,
    chromium_executable,
    context_of,
    missing,
    watched_tab,
)
from tests.support.page.client import PageClient
from tests.support.page.deployment import ShownDeployment, shown_deployment


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for each module: while it runs, its thread has an event loop, and asynchronous tests need their
    own."""
    if chromium_executable() is None:
        missing(WHY_NOT)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def backends(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    with backends_in(6, redis_url, tiny_model, tokenizer) as backends:
        yield backends


@pytest.fixture(scope="session")
def gateway_url(backends: Backends) -> Iterator[tuple[str, bytes]]:
    """A gateway that several tests share, and its secret."""
    backends.clear(None)
    with backends.gateway_url(page={"every_s": 0.2}) as url:
        yield url, backends.secret()


@pytest.fixture
def gateway(backends: Backends, gateway_url: tuple[str, bytes]) -> Iterator[RunningGateway]:
    """It has a bare engine. Redis is empty."""
    with backends.shared(*gateway_url) as gateway:
        yield gateway


@pytest.fixture
def page(gateway: RunningGateway) -> Iterator[PageClient]:
    """The page's requests; nobody is signed in."""
    with httpx.Client(timeout=120) as http:
        yield PageClient(http, gateway.url)


@pytest.fixture
def shown(backends: Backends) -> Iterator[ShownDeployment]:
    with shown_deployment(backends) as shown:
        shown.report()
        yield shown


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """Opens tabs, each in a browser profile of its own. At the end, no script may have complained."""
    with ExitStack() as stack:
        opened: list[Watched] = []

        def open_tab(
            url: str, key: str | None = ADMIN_KEY, size: tuple[int, int] = WIDE, dark: bool = False
        ) -> Watched:
            context = context_of(browser, size, dark)
            stack.callback(context.close)
            watched = watched_tab(context)
            opened.append(watched)
            watched.tab.goto(url)
            if key is not None:
                watched.tab.get_by_label("API key").fill(key)
                watched.tab.get_by_role("button", name="Sign in").click()
                watched.tab.get_by_role("navigation").wait_for()
            return watched

        yield open_tab
        for watched in opened:
            assert not watched.unexpected()
            assert len(watched.hosts) <= 1  # the page's own
