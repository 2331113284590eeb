"""The page `/docs`: what a service's OpenAPI document says, as HTML without a script or a foreign file.

Its headers are those of every page of ours: a browser runs and loads nothing but files of the service.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response

CONTENT_SECURITY_POLICY: Final = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        # The browser refuses markup and code that are made from strings.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
COMMON: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
HTML: Final = {
    **COMMON,
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}
REFUSED = "refused"
"""The description of all answers that are an error."""
REFERENCE, LINK = re.compile(r"#/components/schemas/([\w.-]+)"), r'<a href="#\1">\1</a>'
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border-top: 1px solid #ccc; padding: .3rem 0 }
summary { cursor: pointer }
summary b { display: inline-block; min-width: 5rem; font-family: monospace }
code, pre { font-family: monospace; overflow-x: auto }
"""


def api_page(app: FastAPI) -> APIRouter:
    """The routes of the page. Whoever adds routes later is on it, too."""
    router = APIRouter(include_in_schema=False)

    @cache
    def page() -> str:
        return "".join(_page(app.openapi()))

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> Response:
        return HTMLResponse(page(), headers=HTML)

    @router.api_route("/docs/style.css", methods=["GET", "HEAD"])
    async def style() -> Response:
        return Response(STYLE, headers=COMMON, media_type="text/css")

    return router


def _page(document: dict[str, Any]) -> Iterator[str]:
    title = escape(document["info"]["title"])
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="stylesheet" '
    yield f'href="docs/style.css"><title>{title}</title></head><body><h1>{title}</h1>'
    yield '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from _operation(method, path, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        yield f"<details><summary><code>{escape(name)}</code></summary>"
        # A link to what is inside opens it.
        yield f'<div id="{escape(name)}">{_json(schema)}</div></details>'
    yield "</body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    summary = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code>"
    yield f"<details><summary>{summary} {escape(operation.get('summary', ''))}</summary>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    refused = {status for status, each in operation["responses"].items() if each["description"] == REFUSED}
    answers = {status: each for status, each in operation["responses"].items() if status not in refused}
    for name in ("parameters", "requestBody"):
        if name in operation:
            yield f"<h4>{name}</h4>{_json(operation[name])}"
    yield f"<h4>responses</h4>{_json(answers)}"
    if refused:
        yield f"<p>Refused with: {escape(', '.join(sorted(refused)))}</p>"
    yield "</details>"


def _json(value: Any) -> str:
    text = escape(json.dumps(value, indent=2, ensure_ascii=False))
    return f"<pre>{REFERENCE.sub(LINK, text)}</pre>"
