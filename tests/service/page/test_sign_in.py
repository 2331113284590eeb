"""Signing in on the page: the cookie, what it opens, and when it ends."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from rollout_queue.http.callers import digest
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.page.client import PageClient

SIGN_IN = b'{"api_key": "%s"}' % ADMIN_KEY.encode()


@contextmanager
def page_of(backends: Backends, **settings: Any) -> Iterator[tuple[PageClient, RunningGateway]]:
    """A gateway of its own, with these settings of the page; its admin is signed in."""
    backends.clear(None)
    with backends.gateway(page=settings) as gateway, httpx.Client(timeout=120) as http:
        page = PageClient(http, gateway.url)
        page.sign_in(ADMIN_KEY)
        yield page, gateway


def test_the_cookie_is_hidden_from_scripts_and_from_other_sites(page: PageClient) -> None:
    given = page.sign_in(ADMIN_KEY).headers["set-cookie"]
    name, *attributes = given.split("; ")
    assert name.startswith("weir_page=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} < set(attributes)
    assert not any(each.startswith("Domain") for each in attributes)


def test_over_https_no_other_host_can_set_the_cookie(page: PageClient, gateway: RunningGateway) -> None:
    page.http.cookies.clear()
    given = page.sign_in(ADMIN_KEY, **{"x-forwarded-proto": "https"}).headers["set-cookie"]
    assert given.startswith("__Host-weir_page=")
    assert "Secure" in given.split("; ")
    token = given.partition("=")[2].partition(";")[0]
    secure = {"x-forwarded-proto": "https", "sec-fetch-site": "same-origin"}
    for name, status in (("__Host-weir_page", 200), ("weir_page", 401)):
        reply = httpx.get(
            f"{gateway.url}/admin/status", headers={**secure, "cookie": f"{name}={token}"}, timeout=120
        )
        assert reply.status_code == status


def test_redis_and_the_log_have_neither_the_key_nor_the_token(
    page: PageClient, gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="gateway"):
        page.sign_in(ADMIN_KEY)
        page.get("/admin/status")
    assert "signed in" in caplog.text
    redis: Any = gateway.redis
    names = redis.keys("weir:page*")
    assert len(names) == 2
    stored = b" ".join([*names, redis.get(f"weir:page_session:{digest(page.cookie)}")]).decode()
    assert digest(ADMIN_KEY) in stored
    for secret in (ADMIN_KEY, page.cookie):
        assert secret not in stored
        assert secret not in caplog.text


def test_an_admins_sign_in_is_among_the_admin_actions(page: PageClient) -> None:
    page.sign_in(ADMIN_KEY)
    (action,) = page.get("/admin/actions").json()["data"]
    said = (action["method"], action["path"], action["key"])
    assert said == ("POST", "/page/session", f"key-{digest(ADMIN_KEY)[:8]}")


def test_an_unknown_key_does_not_sign_in_and_a_session_key_neither(
    page: PageClient, gateway: RunningGateway
) -> None:
    session_key = gateway.session()["api_key"]
    for key, status in (("wrong", 401), ("", 401), (session_key, 403)):
        reply = page.sign_in(key)
        assert reply.status_code == status
        assert "set-cookie" not in reply.headers
        assert reply.json()["error"]["type"] in ("authentication_error", "permission_error")


@pytest.mark.parametrize(
    ("body", "media_type", "status"),
    [
        *((body, "application/json", 400) for body in (b"", b"[]", b'{"api_key": 1}', b'{"key": "x"}')),
        (b"{" * 100, "application/json", 400),
        (b'{"api_key": "caf\xe9"}', "application/json", 400),
        (SIGN_IN.decode().encode("utf-16"), "application/json", 400),
        (SIGN_IN, "text/plain", 415),
        (SIGN_IN + b" " * 5000, "application/json", 413),
    ],
)
def test_a_body_that_is_no_sign_in_is_refused(
    page: PageClient, body: bytes, media_type: str, status: int
) -> None:
    headers = {"content-type": media_type, "sec-fetch-site": "same-origin"}
    reply = page.http.post(f"{page.url}/page/session", content=body, headers=headers)
    assert reply.status_code == status


def test_the_cookie_opens_what_the_key_opens_but_not_the_agents_side(
    page: PageClient, gateway: RunningGateway
) -> None:
    session = gateway.session()["session_id"]
    page.sign_in(ADMIN_KEY)
    assert page.get("/admin/status").status_code == 200
    assert page.get(f"/sessions/{session}").status_code == 200
    assert page.send("POST", "/admin/policies/hold", {}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", f"/sessions/{session}/v1/models"),
        ("GET", "/v1/responses/r"),
        ("POST", "/v1/chat/completions"),
        ("POST", f"/sessions/{session}/v1/chat/completions"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/api/v1/create_session"),
    ):
        assert page.send(method, path, chat if method == "POST" else None).status_code == 401, path


def test_a_client_key_shows_its_own_sessions_only(page: PageClient, gateway: RunningGateway) -> None:
    own = gateway.session()["session_id"]
    foreign = gateway.post("/sessions", {}, key=OTHER_KEY).json()["session_id"]
    assert page.sign_in(CLIENT_KEY).json()["role"] == "client"
    assert [each["session_id"] for each in page.get("/sessions").json()["data"]] == [own]
    assert page.get(f"/sessions/{foreign}").status_code == 404
    assert page.get("/admin/status").status_code == 403
    assert page.get("/page/events").status_code == 403
    assert page.send("POST", f"/sessions/{own}/reward", {"value": 1.0}).status_code == 200


def test_signing_out_ends_the_cookie(page: PageClient) -> None:
    page.sign_in(ADMIN_KEY)
    token = page.cookie
    assert page.send("DELETE", "/page/session").json()["role"] is None
    page.http.cookies.clear()
    assert page.get("/admin/status", cookie=f"weir_page={token}").status_code == 401


def test_a_revoked_key_ends_its_sign_ins(page: PageClient, gateway: RunningGateway) -> None:
    made = gateway.post("/admin/keys", {"name": "night", "role": "admin"}, key=ADMIN_KEY).json()
    page.sign_in(made["api_key"])
    assert page.get("/admin/status").status_code == 200
    gateway.call("DELETE", "/admin/keys/night", key=ADMIN_KEY)
    assert page.get("/admin/status").status_code == 401
    assert page.get("/page/session").json()["role"] is None


def test_a_sign_in_ends_when_it_is_idle_and_when_it_is_old(backends: Backends) -> None:
    with page_of(backends, idle_s=1000, longest_s=1500) as (page, gateway):
        name = f"weir:page_session:{digest(page.cookie)}"
        gateway.redis.expire(name, 500)
        assert page.get("/admin/status").status_code == 200
        assert 900 < int(gateway.redis.ttl(name)) <= 1000, "a request begins the idle time anew"
        stored: Any = gateway.redis.get(name)
        old = json.loads(stored)
        gateway.redis.set(name, json.dumps(old | {"ends_at": 1.0}))
        assert page.get("/admin/status").status_code == 401


def test_one_secret_has_a_bounded_number_of_sign_ins(backends: Backends) -> None:
    with page_of(backends, sessions_per_key=2) as (page, gateway):
        tokens = [page.cookie]
        for _ in range(2):
            page.http.cookies.clear()
            page.sign_in(ADMIN_KEY)
            tokens.append(page.cookie)
        page.http.cookies.clear()
        statuses = [page.get("/admin/status", cookie=f"weir_page={each}").status_code for each in tokens]
        assert statuses == [401, 200, 200]
        assert len(gateway.redis.keys("weir:page_session:*")) == 2


def test_without_the_page_no_cookie_opens_anything(backends: Backends) -> None:
    with page_of(backends) as (page, _):
        token = page.cookie
        with backends.gateway(page={"enabled": False}) as closed:
            page.url = closed.url
            assert page.get("/admin/status", cookie=f"weir_page={token}").status_code == 401
            for path in ("/", "/page/session", "/page/events"):
                assert page.get(path).status_code in (401, 404)
