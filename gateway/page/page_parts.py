"""Builds what the page's routes share, and closes it.

The page's files: read once at the start, and served from memory under a path with their common version.

A path is looked up as a name, so no path leads to another file of the machine.
"""

import gzip
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from gateway.edge.reply import one_line
from gateway.edge.request import BodyBudget
from gateway.page.live import LiveFeed
from gateway.page.page_access import PageDoor, PageSessions
from gateway.parts import GatewayParts
from gateway.rest.deployment import system_status
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.callers import public_hosts
from rollout_queue.http.worker_processes import Siblings

TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLACE = "{assets}"
"""What index.html has in place of the path with the version."""


@dataclass(frozen=True)
class PageFile:
    """One file."""

    body: bytes
    zipped: bytes
    media_type: str
    etag: str


@dataclass(frozen=True)
class PageFiles:
    """All files. `version` is a digest of them, so a changed file has another path."""

    html: bytes
    files: Mapping[str, PageFile]
    """By name, such as `views/now.js`."""
    version: str


@cache
def page_files() -> PageFiles:
    """The files beside this module."""
    root = files("gateway.page") / "assets"
    found = {name: each.read_bytes() for name, each in sorted(_walk(root, ""))}
    html = found.pop("index.html")
    served = {name: _file(name, body) for name, body in found.items() if _suffix(name) in TYPES}
    whole = hashlib.sha256(html)
    for name, each in served.items():
        whole.update(name.encode() + b"\0" + each.etag.encode())
    version = whole.hexdigest()[:16]
    return PageFiles(html.replace(PLACE.encode(), f"/page/assets/{version}".encode()), served, version)


def _file(name: str, body: bytes) -> PageFile:
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return PageFile(body, gzip.compress(body, 9, mtime=0), TYPES[_suffix(name)], etag)


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for each in folder.iterdir():
        if each.is_dir():
            found += _walk(each, f"{prefix}{each.name}/")
        else:
            found.append((prefix + each.name, each))
    return found


SIGN_IN_BYTES = 4096
"""The largest body of a sign-in. Nobody has shown a key yet, so all such bodies together are bounded, too."""


@dataclass(frozen=True)
class PageParts:
    """Open while the application runs."""

    door: PageDoor
    feed: LiveFeed
    bodies: BodyBudget


@asynccontextmanager
async def opened_page(gateway: GatewayParts, siblings: Siblings) -> AsyncIterator[PageParts | None]:
    """The page's parts; None if the settings turn the page off."""
    settings = gateway.settings.page
    if not settings.enabled:
        yield None
        return
    page_files()  # from now on the files are in memory
    hosts = public_hosts(gateway.settings.public_url)
    door = PageDoor(PageSessions(gateway.redis, settings), gateway.identities, hosts)
    picture = picture_of(gateway, siblings)
    feed = LiveFeed(picture, settings.every_s, settings.viewers, gateway.metrics)
    bodies = BodyBudget(SIGN_IN_BYTES, 256 * SIGN_IN_BYTES, 256 * SIGN_IN_BYTES, gateway.metrics)
    try:
        yield PageParts(door, feed, bodies)
    finally:
        await feed.aclose()


def picture_of(gateway: GatewayParts, siblings: Siblings) -> Callable[[], Awaitable[bytes]]:
    """The function that makes the event of one picture: the answers of two routes, and the page's version."""

    async def picture() -> bytes:
        try:
            status = await system_status(gateway, siblings)
            pipeline = asdict(await gateway.pipeline.report())
        except StorageUnavailable as error:
            return event("trouble", {"message": str(error)})
        shown = status.model_dump(mode="json", exclude_unset=True)
        return event("picture", {"status": shown, "pipeline": pipeline, "page": page_files().version})

    return picture


def event(name: str, data: object) -> bytes:
    """A server-sent event. JSON has no line ends, so a text in it cannot begin another event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), one_line(msgspec.json.encode(data)))
