"""A hostile user's afternoon: odd requests to the page and the REST, without a key or as a client.

Other attacks have files of their own: `test_csrf.py`, `test_wrong_keys.py`, `test_files.py`, `tests/page`.
"""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.page.client import PageClient, raw, status_of
from tests.support.waiting import wait_until

SECRET = "held-because-of-a-secret"


@pytest.fixture
def gateway(gateway: RunningGateway) -> RunningGateway:
    """Its hold has a reason that only admins may read."""
    reply = gateway.post("/admin/policies/hold", {"reason": SECRET}, key=ADMIN_KEY)
    assert reply.status_code == 200
    return gateway


ADMIN_PATHS = [
    "/admin/policies/serving",
    "//admin/policies/serving",
    "/admin//policies/serving",
    "/admin%2fpolicies%2fserving",
    "/page/../admin/policies/serving",
    "/page/assets/../../admin/policies/serving",
    "/sessions/..%2fadmin%2fpolicies%2fserving",
    "/ADMIN/policies/serving",
    "/admin/policies/serving/",
    "/admin/policies/serving;v1",
    "/admin/policies/serving%00",
    "http://127.0.0.1/admin/policies/serving",
]


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_no_spelling_of_a_path_opens_it(gateway: RunningGateway, page: PageClient, path: str) -> None:
    page.sign_in(CLIENT_KEY)
    for cookie in ("", f"cookie: weir_page={page.cookie}\r\nsec-fetch-site: same-origin\r\n"):
        reply = raw(gateway.url, f"GET {path} HTTP/1.1\r\nhost: HOST\r\n{cookie}connection: close")
        assert status_of(reply) in (307, 400, 401, 403, 404), reply[:200]
        assert SECRET.encode() not in reply


@pytest.mark.parametrize("method", ["PUT", "PATCH", "TRACE", "OPTIONS", "CONNECT", "HEAD", "PROPFIND"])
def test_no_other_method_signs_in_or_out(gateway: RunningGateway, page: PageClient, method: str) -> None:
    page.sign_in(ADMIN_KEY)
    body = json.dumps({"api_key": ADMIN_KEY}).encode()
    head = (
        f"{method} /page/session HTTP/1.1\r\nhost: HOST\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-http-method-override: POST\r\nconnection: close"
    )
    reply = raw(gateway.url, head, body)
    assert status_of(reply) in (400, 401, 403, 404, 405)
    assert b"set-cookie" not in reply.lower()
    assert ADMIN_KEY.encode() not in reply
    assert page.get("/admin/status").status_code == 200


def test_a_method_of_another_name_needs_the_token_as_well(page: PageClient) -> None:
    page.sign_in(ADMIN_KEY)
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "post"):
        reply = page.http.request(method, f"{page.url}/admin/policies/release", headers={"origin": page.url})
        assert reply.status_code in (403, 405), method
    assert SECRET in page.get("/admin/policies/serving").text


def test_heads_that_are_too_large_or_broken_are_refused(gateway: RunningGateway) -> None:
    for header in (
        "cookie: weir_page=" + "x" * 100_000,
        "cookie: " + "; ".join(f"weir_page={'y' * 43}{number}" for number in range(4000)),
        "x-weir-csrf: " + "x" * 100_000,
    ):
        reply = raw(gateway.url, f"GET /admin/status HTTP/1.1\r\nhost: HOST\r\n{header}\r\nconnection: close")
        assert status_of(reply) in (400, 401, 431), reply[:100]
    for head in (
        "GET / HTTP/9.9\r\nhost: HOST\r\nconnection: close",
        "GET /page/\x01 HTTP/1.1\r\nhost: HOST\r\nconnection: close",
        "\x00\x00",
    ):
        reply = raw(gateway.url, head)
        assert reply == b"" or status_of(reply) in (400, 404, 505)


def test_many_cookies_of_the_name_sign_nobody_in(gateway: RunningGateway, page: PageClient) -> None:
    page.sign_in(ADMIN_KEY)
    good, headers = page.cookie, {"sec-fetch-site": "same-origin"}
    for cookie in (
        "; ".join([*(f"weir_page={number:043}" for number in range(200)), f"weir_page={good}"]),
        f"weir_page={good}{good}",
        f"weir_page={good[:-1]}",
        f"weir_page={good.swapcase()}",
        f"weir_page = {good}",
        f'weir_page="{good}"',
        f"__Host-weir_page={good}",
        f"Weir_Page={good}",
        f"weir_page={good}\0",
    ):
        request = f"GET /admin/status HTTP/1.1\r\nhost: HOST\r\ncookie: {cookie}\r\nconnection: close"
        assert status_of(raw(gateway.url, request)) in (400, 401), cookie
    assert page.get("/admin/status", **headers).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"api_key": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"api_key": "a", "api_key": ["%s"]}' % ADMIN_KEY.encode(),
        b'{"api_key": "%s", "role": "admin"}' % CLIENT_KEY.encode(),
        b'{"api_key": "\\ud800"}',
        b'{"api_key": "' + b"x" * 3000 + b'"}',
        b"\xff\xfe{}",
        b"api_key=" + ADMIN_KEY.encode(),
    ],
)
def test_odd_sign_ins_are_refused_and_echo_nothing(page: PageClient, body: bytes) -> None:
    headers = {"content-type": "application/json", "sec-fetch-site": "same-origin"}
    reply = page.http.post(f"{page.url}/page/session", content=body, headers=headers)
    assert reply.status_code in (400, 401)
    assert "set-cookie" not in reply.headers
    for secret in (ADMIN_KEY, CLIENT_KEY, "xxxx"):
        assert secret not in reply.text


def test_a_clients_sign_in_reaches_no_admin_path_by_any_method(
    gateway: RunningGateway, page: PageClient
) -> None:
    page.sign_in(CLIENT_KEY)
    document = gateway.get("/openapi.json", key=None).json()
    tried = 0
    for path, methods in document["paths"].items():
        if path.startswith("/admin/"):
            for method in methods:
                address = path.replace("{", "").replace("}", "").replace("version", "0")
                reply = page.send(method.upper(), address, {} if method != "get" else None)
                assert reply.status_code == 403, (method, path)
                tried += 1
    assert tried > 20


def test_many_streams_and_many_sign_ins_leave_the_gateway_at_work(
    backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    """More viewers than allowed, and bodies that never end, while an agent calls. To hang up is no bug."""
    backends.clear(None)
    over, statuses = threading.Event(), []
    with backends.gateway(page={"viewers": 8}) as gateway:
        address = urlsplit(gateway.url)
        head = (
            f"POST /page/session HTTP/1.1\r\nhost: {address.netloc}\r\nsec-fetch-site: same-origin\r\n"
            "content-type: application/json\r\ncontent-length: 4000\r\n\r\n{"
        )

        def look(_: int) -> None:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            with httpx.stream("GET", f"{gateway.url}/page/events", headers=headers, timeout=300) as reply:
                statuses.append(reply.status_code)
                over.wait(300)

        with ThreadPoolExecutor(16) as pool, ExitStack() as lines:
            viewers = [pool.submit(look, number) for number in range(16)]
            try:
                for _ in range(20):
                    line = socket.create_connection((str(address.hostname), address.port or 80))
                    lines.enter_context(line).sendall(head.encode())
                wait_until(lambda: len(statuses) == 16)
                chat = {"messages": [{"role": "user", "content": "hi"}]}
                assert gateway.post("/v1/chat/completions", chat, timeout=300).status_code == 200
                assert gateway.get("/admin/status", key=ADMIN_KEY, timeout=300).status_code == 200
            finally:
                over.set()
            for each in viewers:
                each.result()
    assert sorted(statuses) == [200] * 8 + [429] * 8
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
