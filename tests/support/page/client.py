"""The page's requests without a browser: signing in, the cookie, the CSRF token."""

from dataclasses import dataclass
from typing import Any

import httpx

SAME_ORIGIN = {"sec-fetch-site": "same-origin"}


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
