"""The bodies that wait are bounded in bytes for each key, and no other caller counts for a key."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollout_queue.contract.ids import new_id
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.waiting import wait_until

PER_KEY, HALF = 40_000, 25_000
"""Bytes: two bodies of `HALF` exceed the bound of a key, one does not."""
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "metadata": {"a": "x" * 15_000}}
LONG["messages"][0]["content"] += " " * (HALF - len(json.dumps(LONG)))


@pytest.fixture
def bounded(backends: Backends) -> Iterator[RunningGateway]:
    backends.clear(None)
    with backends.gateway(max_bodies_bytes_per_key=PER_KEY) as gateway:
        yield gateway


def refused(gateway: RunningGateway, key: str) -> bool:
    reply = gateway.post("/v1/chat/completions", LONG, key=key)
    return reply.status_code == 429 and str(reply.json()["error"]["code"]) == "bodies_limit"


class HalfSent:
    """A call of which all but the last byte of the body has been sent. The gateway holds the rest."""

    def __init__(self, gateway: RunningGateway, key: str) -> None:
        address = urlsplit(gateway.url)
        self._address = (str(address.hostname), int(address.port or 0))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: weir\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {HALF}\r\n\r\n"
        )
        self._sent = head.encode() + b" " * (HALF - 1)
        self._line = self._send()
        wait_until(lambda: refused(gateway, key) or self._again())

    def _send(self) -> socket.socket:
        line = socket.create_connection(self._address)
        line.sendall(self._sent)
        return line

    def _again(self) -> bool:
        """Send it again if it has an answer: it was refused itself, because the other call was held then."""
        if select.select([self._line], [], [], 0)[0]:
            self.close()
            self._line = self._send()
        return False

    def close(self) -> None:
        self._line.close()


def made(gateway: RunningGateway, name: str) -> dict[str, Any]:
    reply = gateway.call("POST", "/admin/keys", {"name": name}, key=ADMIN_KEY)
    assert reply.status_code == 201, reply.text
    return dict(reply.json())


def test_bodies_beyond_the_bound_of_a_key_are_refused_until_others_are_done(bounded: RunningGateway) -> None:
    with closing(HalfSent(bounded, CLIENT_KEY)):
        assert refused(bounded, CLIENT_KEY)
    wait_until(lambda: not refused(bounded, CLIENT_KEY))


def test_the_secrets_of_one_key_share_its_bound(bounded: RunningGateway) -> None:
    name = f"team-{new_id()}"
    first = made(bounded, name)["api_key"]
    second = bounded.call("POST", f"/admin/keys/{name}/rotate", {"keep_s": 600}, key=ADMIN_KEY)
    assert second.status_code in (200, 201), second.text
    with closing(HalfSent(bounded, first)):
        assert refused(bounded, second.json()["api_key"])


def test_a_session_named_like_anothers_key_does_not_use_up_its_bound(bounded: RunningGateway) -> None:
    name = f"team-{new_id()}"
    victim = made(bounded, name)["api_key"]
    session = bounded.session(session_id=name)
    with closing(HalfSent(bounded, session["api_key"])):
        assert not refused(bounded, victim)


def test_a_body_that_never_fits_is_not_tried_again(bounded: RunningGateway) -> None:
    reply = bounded.chat("x" * (PER_KEY + 1))
    assert (reply.status_code, "retry-after" in reply.headers) == (413, False), reply.text
