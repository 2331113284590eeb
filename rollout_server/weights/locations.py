"""Decides from which places weights may come, before any file is opened or any URL called.

location ─▶ parse_location ─▶ FileLocation (a directory here), HttpLocation (a URL) or ObjectPrefix (s3://),
                              else LocationRefused

A policy is named as a caller asks for it (WantedPolicy), and as it lies on this machine (LocalPolicy).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_server.errors import LocationRefused


@dataclass(frozen=True)
class WantedPolicy:
    """A version that is to be served. Only the one that the engine starts with has no location."""

    version: int
    location: str | None = None
    manifest_sha256: str | None = None
    peer: str | None = None
    """The URL of a rollout server that has its files."""
    name: str | None = None
    """The name of an adapter that is a policy of its own; None for the fleet's policy."""

    def is_same_as(self, policy: "LocalPolicy") -> bool:
        """Whether `policy` is this version, with this content."""
        digest = self.manifest_sha256
        same_content = digest is None or digest.lower() == policy.manifest_sha256
        return self.version == policy.version and same_content


@dataclass(frozen=True)
class LocalPolicy:
    """One numbered set of weights on this machine, as the engine loads it."""

    version: int
    directory: Path
    manifest_sha256: str | None = None
    """None for the model that the engine starts with: nobody published it."""
    base: "LocalPolicy | None" = None
    """For a LoRA adapter, the weights that it is applied to."""
    name: str | None = None
    """As in `WantedPolicy`."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a version is not negative: {self.version}")

    @property
    def weights(self) -> "LocalPolicy":
        """The whole weights that the engine has in memory when it serves this policy."""
        return self.base or self

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name in the engine, which belongs to this content alone; None without an adapter.

        SGLang loads an adapter that it has dropped again from the directory that its name had before. So a
        name is never used for other content.
        """
        return self.directory.name if self.base is not None else None


DEFAULT_PORTS = {"http": 80, "https": 443}
OBJECT_SCHEME = "s3"
PLAIN_URL_PATH = re.compile(r"[A-Za-z0-9._~/@=+-]*")
"""Paths without percent escapes, `;` and backslashes: this service and the other server read them alike."""


@dataclass(frozen=True)
class FileLocation:
    """A directory on this machine; `roots` are the directories that no link may lead out of."""

    directory: Path
    roots: tuple[Path, ...]

    def resolve(self, name: str = "") -> Path:
        """The path of a file, with links followed. Raises LocationRefused if it is outside of every root."""
        path = (self.directory / name).resolve()
        if not any(path.is_relative_to(root.resolve()) for root in self.roots):
            raise LocationRefused(
                f"a link in the location leads out of the allowed directories at {name or '.'}"
            )
        return path


@dataclass(frozen=True)
class HttpLocation:
    """A URL without a trailing slash, under which each file has its name."""

    url: str
    peer: bool = False
    """It is another rollout server, which the gateway has named."""

    @classmethod
    def of_peer(cls, server: str, version: int, manifest_sha256: str) -> "HttpLocation":
        """Where another server offers a version. Raises LocationRefused."""
        _require_plain_path(_split(server))
        return cls(f"{server.rstrip('/')}/weights/{version}/{manifest_sha256}", peer=True)


Location = FileLocation | HttpLocation | ObjectPrefix


def parse_location(location: str, allowed: Sequence[str]) -> Location:
    """Raises LocationRefused unless `location` lies under one of the `allowed` prefixes.

    The error does not repeat the location, which may hold a secret.
    """
    parts = _split(location)
    if parts.scheme == "file":
        directory = _file_path(parts)
        roots = tuple(_file_path(root) for prefix in allowed if (root := _split(prefix)).scheme == "file")
        if not any(directory.is_relative_to(root) for root in (*roots, *(root.resolve() for root in roots))):
            raise LocationRefused("the location is in no allowed directory (rollout_server.locations)")
        return FileLocation(directory, roots)
    if parts.scheme == OBJECT_SCHEME:
        place = _object_prefix(location)
        if not any(place.is_under(_object_prefix(each)) for each in allowed if each.startswith("s3:")):
            raise LocationRefused("the location is under no allowed prefix (rollout_server.locations)")
        return place
    _require_plain_path(parts)
    if not any(is_under(location, prefix) for prefix in allowed):
        raise LocationRefused("the location is under no allowed URL (rollout_server.locations)")
    return HttpLocation(location.rstrip("/"))


def is_under(url: str, prefix: str) -> bool:
    """Whether `url` has the scheme, host and port of `prefix`, and a path that begins with its segments."""
    one, other = _split(url), _split(prefix)
    if one.scheme not in DEFAULT_PORTS or _origin(one) != _origin(other):
        return False
    root = other.path.rstrip("/")
    return one.path == root or one.path.startswith(f"{root}/")


def _split(location: str) -> SplitResult:
    if any(ord(character) <= 32 or ord(character) == 127 for character in location):
        raise LocationRefused("the location holds blanks or control characters")
    try:
        parts = urlsplit(location)
        _ = parts.port
    except ValueError as error:
        raise LocationRefused("the location is not a URL") from error
    if parts.scheme not in ("file", OBJECT_SCHEME, *DEFAULT_PORTS):
        raise LocationRefused("the location is neither file:// nor http:// nor https:// nor s3://")
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise LocationRefused("the location holds credentials")
    if parts.query or parts.fragment or "?" in location or "#" in location:
        raise LocationRefused("the location holds a query or a fragment")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or DEFAULT_PORTS.get(parts.scheme)


def _file_path(parts: SplitResult) -> Path:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise LocationRefused("the location is not an absolute path on this machine")
    # `..` is resolved in the text, so no link on the disk can change its meaning.
    return Path(os.path.normpath(path))


def _object_prefix(url: str) -> ObjectPrefix:
    try:
        return ObjectPrefix.parse(url)
    except ValueError as error:
        raise LocationRefused(f"the location {error}") from error


def _require_plain_path(parts: SplitResult) -> None:
    if not parts.hostname or not PLAIN_URL_PATH.fullmatch(parts.path):
        raise LocationRefused("the location is not a plain URL")
    if any(segment in (".", "..") for segment in parts.path.split("/")):
        raise LocationRefused("the location has a segment . or ..")
