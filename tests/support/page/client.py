"""The page's requests without a browser: signing in, the cookie, the CSRF token."""

import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


def raw(url: str, head: str, body: bytes = b"") -> bytes:
    """Send a request as it is written, with the host for HOST. Returns all that comes back."""
    address = urlsplit(url)
    with socket.create_connection((str(address.hostname), address.port or 80), timeout=300) as line:
        line.sendall(head.replace("HOST", address.netloc).encode("latin-1") + b"\r\n\r\n" + body)
        return b"".join(iter(lambda: line.recv(65536), b""))


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


@dataclass
class PageClient:
    """What a browser that is signed in sends."""

    http: httpx.Client
    url: str
    csrf: str = ""

    def sign_in(self, key: str, **headers: str) -> httpx.Response:
        reply = self.http.post(
            f"{self.url}/page/session", json={"api_key": key}, headers={**SAME_ORIGIN, **headers}
        )
        self.csrf = reply.json().get("csrf", "") if reply.status_code == 200 else ""
        return reply

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(self.url + path, headers={**SAME_ORIGIN, **headers})

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        given = {**SAME_ORIGIN, "x-weir-csrf": self.csrf, **headers}
        return self.http.request(method, self.url + path, json=body, headers=given)

    @property
    def cookie(self) -> str:
        """The value of the cookie."""
        return next(iter(self.http.cookies.values()))
