"""The page's cookie. Scripts cannot read it, and no other site can have a browser send it.

https    `__Host-weir_page`, with `Secure`: no other host, and no page over http, can set it
http     `weir_page`: the page on loopback, or behind a proxy that does not say that it speaks https
"""

import re

from starlette.types import Scope

NAME, SECURE_NAME = "weir_page", "__Host-weir_page"
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def page_token(scope: Scope) -> str | None:
    """The token of the request's cookie.

    None without one, and with several different ones: a page on another port, or in a lower path, has set a
    cookie of its own, and which one is the user's cannot be told.
    """
    name = SECURE_NAME if _is_secure(scope) else NAME
    found = {value for key, value in _cookies(scope) if key == name}
    token = found.pop() if len(found) == 1 else ""
    return token if TOKEN.fullmatch(token) else None


def set_cookie(scope: Scope, token: str, longest_s: float) -> str:
    """The value of `Set-Cookie`; an empty token removes the cookie."""
    secure = _is_secure(scope)
    age = int(longest_s) if token else 0
    parts = [f"{SECURE_NAME if secure else NAME}={token}", "Path=/", f"Max-Age={age}", "HttpOnly"]
    return "; ".join([*parts, "SameSite=Strict", *(["Secure"] if secure else [])])


def _is_secure(scope: Scope) -> bool:
    """Whether the browser used https. A proxy says so by `x-forwarded-proto`, which no other site can have a
    browser send."""
    told = dict(scope["headers"]).get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
    return bool((told if told in ("http", "https") else scope["scheme"]) == "https")


def _cookies(scope: Scope) -> list[tuple[str, str]]:
    found = []
    for name, value in scope["headers"]:
        if name == b"cookie":
            for part in value.decode("latin-1").split(";"):
                key, equals, text = part.strip().partition("=")
                if equals:
                    found.append((key, text))
    return found
