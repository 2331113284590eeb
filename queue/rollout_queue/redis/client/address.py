"""Reads `redis_url`: one server, the sentinels of a master, or the nodes of a cluster.

redis://[user:password@]host:port/db                     rediss:// with TLS; unix:///path for a local socket
redis+sentinel://[user:password@]h1:p1,h2:p2/master/db   rediss+sentinel:// with TLS, the sentinels as well
redis+cluster://[user:password@]h1:p1,h2:p2              rediss+cluster:// with TLS
"""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from redis.connection import parse_url

Node = tuple[str, int]
"""Host and port."""
Kind = Literal["single", "sentinel", "cluster"]
DEFAULT_PORTS = {"single": 6379, "sentinel": 26379, "cluster": 6379}
SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True)
class RedisAddress:
    """Where Redis is, and how a client introduces itself."""

    kind: Kind
    nodes: tuple[Node, ...]
    """One server, or sentinels, or nodes of a cluster; none for a socket in the file system."""
    master: str | None
    """The name by which the sentinels know the master."""
    tls: bool
    fields: dict[str, Any] = field(repr=False)
    """Arguments of redis-py's connection: database, user, password, path of a socket, options of the URL."""


def read_address(url: str) -> RedisAddress:
    """Raises ValueError, whose text has no part of the URL that may be a secret."""
    scheme, _, rest = url.partition("://")
    base, _, mode = scheme.partition("+")
    kind: Kind | None = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}.get(mode)  # type: ignore[assignment]
    if base not in SCHEMES or kind is None or (kind != "single" and base == "unix"):
        raise ValueError(
            "give redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or "
            "rediss+cluster://"
        )
    netloc, slash, path = rest.partition("/")
    user_info, at, listed = netloc.rpartition("@")
    master = None
    if kind == "sentinel":
        master, _, path = path.partition("/")
        if not master:
            raise ValueError("name the master after the sentinels: redis+sentinel://h1:p1,h2:p2/mymaster/0")
    nodes = () if base == "unix" else tuple(_node(each, DEFAULT_PORTS[kind]) for each in listed.split(","))
    if kind == "single" and len(nodes) > 1:
        raise ValueError("redis:// has one host; several need redis+sentinel:// or redis+cluster://")
    single = f"{base}://{user_info}{at}{listed if kind == 'single' else 'master:1'}{slash}{path}"
    try:
        fields = dict(parse_url(single))  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError("it is no URL of Redis; in a password, write @ as %40, / as %2F, : as %3A") from None
    if kind == "cluster" and fields.get("db"):
        raise ValueError("a cluster has no databases but 0")
    for name in ("host", "port", "connection_class"):
        fields.pop(name, None)
    return RedisAddress(kind, nodes, master, base == "rediss", fields)


def _node(text: str, port: int) -> Node:
    try:
        parts = urlsplit(f"//{text}")
        return parts.hostname or "localhost", parts.port or port
    except ValueError:
        raise ValueError("its hosts must be host:port, separated by commas") from None


def without_password(url: str) -> str:
    """The URL for messages: without user, password and options."""
    scheme, _, rest = url.partition("?")[0].rpartition("://")
    netloc, slash, path = rest.partition("/")
    return f"{scheme}://{netloc.rpartition('@')[2]}{slash}{path}"
