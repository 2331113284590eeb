"""Guessing keys: it is slowed down, and disturbs nobody who has one."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.edge.asgi import ADDRESSES, WrongKeys
from gateway.settings import WrongKeySettings
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.page.client import PageClient
from tests.support.turned_clock import TurnedClock

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def gateway(backends: Backends, turned: TurnedClock) -> Iterator[RunningGateway]:
    """A minute on the clock that a test turns gives an address its whole allowance back."""
    backends.clear(None)
    limits = {"per_address": 5, "in_all": 50, "delay_s": 0}
    with backends.gateway(wrong_keys=limits) as gateway:
        yield gateway


def test_wrong_keys_beyond_the_limit_get_a_429_and_valid_keys_do_not(
    gateway: RunningGateway, turned: TurnedClock
) -> None:
    """A request without a key is no guess."""
    assert {gateway.get("/admin/status", key=None).status_code for _ in range(20)} == {401}
    tried: list[tuple[str, str, Any]] = [
        ("GET", "/admin/status", None),
        ("POST", "/admin/policies/hold", {}),
        ("GET", "/sessions", None),
        ("POST", "/v1/chat/completions", CHAT),
        ("GET", "/v1/models", None),
    ]
    for method, path, body in tried:
        replies = [gateway.call(method, path, body, key=f"wrong-{number}") for number in range(8)]
        assert [each.status_code for each in replies] == [401] * 5 + [429] * 3, path
        last = replies[-1]
        assert last.json()["error"]["code"] == "wrong_keys", path
        assert 1 <= int(last.headers["retry-after"]) <= 60, path
        assert last.headers["x-should-retry"] == "false", path
        assert last.headers["x-request-id"], path
        assert gateway.call(method, path, body, key=ADMIN_KEY).status_code == 200, path
        assert gateway.chat(key=CLIENT_KEY).status_code == 200, path
        turned.turn(60.0)


def test_signing_in_counts_as_well_and_a_valid_key_signs_in(gateway: RunningGateway) -> None:
    with httpx.Client(timeout=120) as http:
        page = PageClient(http, gateway.url)
        statuses = [page.sign_in(f"wrong-{number}").status_code for number in range(7)]
        assert statuses == [401] * 5 + [429] * 2
        assert page.sign_in(ADMIN_KEY).status_code == 200


async def test_each_address_has_an_allowance_of_its_own_which_comes_back(stopped: TurnedClock) -> None:
    keys = WrongKeys(WrongKeySettings(per_address=3, in_all=1000, delay_s=0))
    assert [await keys.refusal("10.0.0.1") is None for _ in range(4)] == [True, True, True, False]
    assert await keys.refusal("10.0.0.2") is None
    stopped.turn(20.0)  # a third of a minute: one more
    assert [await keys.refusal("10.0.0.1") is None for _ in range(2)] == [True, False]


@pytest.mark.usefixtures("stopped")
async def test_all_addresses_together_have_a_limit() -> None:
    keys = WrongKeys(WrongKeySettings(per_address=3, in_all=10, delay_s=0))
    refused = [await keys.refusal(f"10.0.0.{number}") for number in range(12)]
    assert [each is None for each in refused] == [True] * 10 + [False] * 2


@pytest.mark.usefixtures("stopped")
async def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    keys = WrongKeys(WrongKeySettings(per_address=1, in_all=1000, delay_s=0))
    assert await keys.refusal("2001:db8::1") is None
    assert await keys.refusal("2001:db8::2") is not None
    assert await keys.refusal("2001:db8:0:1::1") is None
    assert await keys.refusal("::ffff:10.0.0.1") is None
    assert await keys.refusal("10.0.0.1") is not None


@pytest.mark.usefixtures("stopped")
async def test_the_memory_for_addresses_is_bounded() -> None:
    keys = WrongKeys(WrongKeySettings(per_address=1, in_all=10**6, delay_s=0))
    for number in range(ADDRESSES + 1000):
        await keys.refusal(f"address-{number}")
    assert keys.remembered == ADDRESSES
