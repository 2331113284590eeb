"""The settings of a connection to Redis, which every service that uses Redis has in its section.

`redis_url` names one server, the sentinels of a master, or the nodes of a cluster.

redis://[user:password@]host:port/db                     rediss:// with TLS; unix:///path for a local socket
redis+sentinel://[user:password@]h1:p1,h2:p2/master/db   rediss+sentinel:// with TLS, the sentinels as well
redis+cluster://[user:password@]h1:p1,h2:p2              rediss+cluster:// with TLS

Replication says how many replicas of Redis must have what was written, before anybody is told that it is
stored.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, field_validator
from redis.connection import parse_url
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue.settings import FOR_TESTS

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


class Replication(NamedTuple):
    """How many replicas must have a record, and how long they may take. Of 0 replicas nothing is asked."""

    replicas: int = 0
    timeout_s: float = 1.0

    @property
    def command(self) -> tuple[str, str, str]:
        return "WAIT", str(self.replicas), str(max(1, round(self.timeout_s * 1000)))

    def require(self, confirmed: int) -> None:
        """Raises redis' TimeoutError: the record is stored, and its caller must not be told so."""
        if confirmed < self.replicas:
            raise RedisTimeoutError(
                f"{confirmed} of {self.replicas} replicas have the record after {self.timeout_s:g} s"
            )


NO_REPLICAS = Replication()


PREFIX_PATTERN = r"^[A-Za-z0-9_.\-]{1,64}$"


class RedisSettings(BaseModel, hide_input_in_errors=True):  # the URL may have a password
    """Where Redis is, who this service is to it, and whom it trusts."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss:// (TLS); redis+sentinel://h1:p1,h2:p2/mymaster/0; redis+cluster://h1:p1,h2:p2."""
    redis_password_file: Path | None = None
    """A file with the password, read whenever a connection is opened. It counts before one in the URL."""
    redis_sentinel_password_file: Path | None = None
    """The password of the sentinels; they have none if this is null."""
    redis_ca_file: Path | None = None
    """The authorities (PEM) that may have signed the certificates of rediss://; null: those of the system."""
    redis_certificate_file: Path | None = None
    """The certificate (PEM) by which this service identifies itself."""
    redis_key_file: Path | None = None
    """The key (PEM) of `redis_certificate_file`."""
    redis_check_hostname: bool = True
    """Whether the certificate must name the host or address to which the service connects."""
    redis_key_prefix: str = Field("weir", pattern=PREFIX_PATTERN)
    """What the names of all keys begin with. Deployments that share a Redis have different prefixes."""

    @field_validator("redis_url")
    @classmethod
    def _readable(cls, value: str) -> str:
        read_address(value)
        return value


class WriterRedisSettings(RedisSettings):
    """The same for a service that records what others were told."""

    redis_wait_replicas: int = Field(0, ge=0, le=8)
    """How many replicas of Redis must have a record before anybody is told that it is stored: a turn, a
    reward, an API key, a version and its number, the plan of what is served."""
    redis_wait_timeout_s: Annotated[float, FOR_TESTS] = Field(1.0, gt=0, le=5)
    """How long the replicas may take. Then the client gets an error, and a turn is retracted."""

    @property
    def replication(self) -> Replication:
        return Replication(self.redis_wait_replicas, self.redis_wait_timeout_s)
