"""Requests that other web sites have a browser send: with a cookie, and to a gateway without keys."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.page.client import PageClient

OPEN: dict[str, list[str]] = {"client_keys": [], "admin_keys": []}


@pytest.fixture
def page(page: PageClient) -> PageClient:
    page.sign_in(ADMIN_KEY)
    return page


@pytest.fixture
def keyless(backends: Backends) -> Iterator[RunningGateway]:
    backends.clear(None)
    with backends.gateway(**OPEN, public_url="https://weir.example") as gateway:
        yield gateway


def held(gateway: RunningGateway, key: str | None = ADMIN_KEY) -> bool:
    return gateway.get("/admin/policies/serving", key=key).json()["hold"] is not None


@pytest.mark.parametrize(
    ("header", "values", "code"),
    [
        ("x-weir-csrf", ("", "wrong", "x" * 43, "of another sign-in"), "csrf"),
        ("sec-fetch-site", ("cross-site", "same-site", "none"), "other_site"),
    ],
)
def test_an_action_needs_the_token_and_comes_from_the_same_origin(
    page: PageClient, gateway: RunningGateway, header: str, values: tuple[str, ...], code: str
) -> None:
    other = PageClient(httpx.Client(timeout=120), gateway.url)
    with other.http:
        other.sign_in(ADMIN_KEY)
    assert other.csrf != page.csrf
    for value in values:
        sent = value.replace("of another sign-in", other.csrf)
        reply = page.send("POST", "/admin/policies/hold", {}, **{header: sent})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, code), value
    assert not held(gateway)


def test_a_browser_without_the_newer_mark_is_known_by_its_origin(page: PageClient) -> None:
    path, csrf = f"{page.url}/admin/policies/hold", {"x-weir-csrf": page.csrf}
    for origin, status in ((page.url, 200), ("http://evil.example", 403), ("null", 403), (None, 403)):
        headers = csrf | ({"origin": origin} if origin else {})
        assert page.http.post(path, json={}, headers=headers).status_code == status


def test_another_site_does_not_read_with_the_cookie(page: PageClient) -> None:
    assert page.get("/admin/status", **{"sec-fetch-site": "none"}).status_code == 200
    for site in ("cross-site", "same-site"):
        assert page.get("/admin/status", **{"sec-fetch-site": site}).status_code == 403


def test_another_site_does_not_sign_a_browser_in(page: PageClient) -> None:
    reply = page.sign_in(ADMIN_KEY, **{"sec-fetch-site": "cross-site"})
    assert reply.status_code == 403
    assert "set-cookie" not in reply.headers


def test_a_key_in_a_header_needs_no_token(gateway: RunningGateway) -> None:
    reply = gateway.post("/admin/policies/hold", {}, key=ADMIN_KEY, headers={"origin": "http://x.example"})
    assert reply.status_code == 200


def test_two_different_cookies_sign_nobody_in(page: PageClient, gateway: RunningGateway) -> None:
    """A page on another port of the host, or in a lower path, may set a second cookie of the name."""
    token = page.cookie
    page.http.cookies.clear()
    forged = "x" * 43
    for cookies, status in (
        (f"weir_page={token}", 200),
        (f"weir_page={token}; weir_page={token}", 200),
        (f"weir_page={token}; weir_page={forged}", 401),
        (f"weir_page={forged}; weir_page={token}", 401),
    ):
        assert page.get("/admin/status", cookie=cookies).status_code == status


def test_a_gateway_without_keys_answers_no_foreign_site(keyless: RunningGateway) -> None:
    own: list[dict[str, str]] = [
        {},
        *({"host": host} for host in ("localhost:1", "[::1]:8000", "127.8.8.8", "weir.example")),
        *({"sec-fetch-site": site} for site in ("same-origin", "none")),
    ]
    near = ("127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example")
    foreign: list[dict[str, str]] = [
        *({"host": host} for host in ("evil.example:8000", *near)),
        *({"sec-fetch-site": site} for site in ("cross-site", "same-site")),
        *({"origin": origin} for origin in ("http://evil.example", "null")),
    ]
    for status, sent in ((200, own), (403, foreign)):
        for headers in sent:
            assert keyless.get("/admin/status", key=None, headers=headers).status_code == status, headers
            assert keyless.chat(key=None, headers=headers).status_code == status, headers


def test_other_sites_may_link_to_the_page_of_a_gateway_without_keys(keyless: RunningGateway) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert keyless.get("/", key=None, headers=link).status_code == 200
    assert keyless.get("/", key=None, headers={"host": "evil.example"}).status_code == 403
