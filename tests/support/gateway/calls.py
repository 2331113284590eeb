"""Calls to a gateway over a plain socket, and what the session records of them."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.support.gateway.running import CLIENT_KEY, RunningGateway

RETRY = "x-stainless-retry-count"


class Call:
    """A call that is sent at once, and whose answer is read when the test asks for it."""

    def __init__(
        self, gateway: RunningGateway, session: dict[str, Any], attempt: int = 0, **body: Any
    ) -> None:
        address = urlsplit(gateway.url)
        said = json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode()
        head = (
            f"POST /sessions/{session['session_id']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {CLIENT_KEY}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(said)}\r\n" + (f"{RETRY}: {attempt}\r\n" if attempt else "") + "\r\n"
        )
        self.line = socket.create_connection((address.hostname, address.port or 80))
        self.line.settimeout(300)
        self.line.sendall(head.encode() + said)

    def hang_up(self) -> None:
        self.line.close()

    def answer(self) -> tuple[int, bytes]:
        """The status and the raw body."""
        heard = b""
        while more := self.line.recv(65536):
            heard += more
        self.line.close()
        head, _, body = heard.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def completion(self) -> dict[str, Any]:
        status, body = self.answer()
        assert status == 200
        completion: dict[str, Any] = json.loads(body)
        return completion


def codes(gateway: RunningGateway, session: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(t["relation"], t["finish_reason"], t["verdict"]["code"]) for t in gateway.turns(session)]
