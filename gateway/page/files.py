"""The page's files: read once at the start, and served from memory under a path with their common version.

A path is looked up as a name, so no path leads to another file of the machine.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

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
