"""Opens a service's client of Redis, as its settings say. This is the only place that does."""

from typing import Any

from redis import ConnectionPool, DriverInfo, Redis
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.maint_notifications import MaintNotificationsConfig

from rollout_queue.redis.client.address import RedisAddress, read_address
from rollout_queue.redis.client.connections import (
    AsyncPlainConnection,
    AsyncSocketConnection,
    AsyncTlsConnection,
    PlainConnection,
    SocketConnection,
    TlsConnection,
)
from rollout_queue.redis.client.credentials import PasswordFile
from rollout_queue.redis.client.masters import ClusterFinder, MasterFinder, SentinelFinder
from rollout_queue.redis.client.prefixes import renaming, slot_of, wire_prefix
from rollout_queue.redis.client.settings import RedisSettings
from rollout_queue.redis.client.strangers import CarefulAsyncRedis, CarefulRedis

CONNECT_TIMEOUT_S = 2.0
"""How long one attempt to connect to Redis may take."""
DRIVER = DriverInfo()
"""What every connection says of redis-py. Without it, each would read the metadata of the package anew."""
NO_NOTICES = MaintNotificationsConfig(enabled=False)
"""With notices of a server's maintenance, redis-py lends connections that Redis has closed."""


def open_redis(settings: RedisSettings, timeout_s: float, **more: Any) -> Redis:
    """A blocking client. It connects when it is used. `more` are further arguments of its connections."""
    address = read_address(settings.redis_url)
    classes = (PlainConnection, TlsConnection, SocketConnection)
    pool = ConnectionPool(_class_for(address, classes), **_fields(settings, address, timeout_s), **more)
    return CarefulRedis.from_pool(pool)


def open_async_redis(settings: RedisSettings, timeout_s: float, **more: Any) -> AsyncRedis:
    """A client for asyncio. It connects when it is used."""
    address = read_address(settings.redis_url)
    classes = (AsyncPlainConnection, AsyncTlsConnection, AsyncSocketConnection)
    pool = AsyncConnectionPool(_class_for(address, classes), **_fields(settings, address, timeout_s), **more)
    return CarefulAsyncRedis.from_pool(pool)


def _class_for(address: RedisAddress, classes: tuple[Any, Any, Any]) -> Any:
    plain, tls, socket = classes
    return socket if not address.nodes else tls if address.tls else plain


def _fields(settings: RedisSettings, address: RedisAddress, timeout_s: float) -> dict[str, Any]:
    """The arguments of redis-py's connection. Those that the URL gives count before the timeouts."""
    secured = _tls(settings) if address.tls else {}
    timeouts = {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_timeout": timeout_s}
    own: dict[str, Any] = {"driver_info": DRIVER, "maint_notifications_config": NO_NOTICES}
    fields = own | timeouts | secured | address.fields
    if settings.redis_password_file is not None:
        fields.pop("password", None)
        fields["credential_provider"] = PasswordFile(
            settings.redis_password_file, fields.pop("username", None)
        )
    prefix = wire_prefix(settings.redis_key_prefix, cluster=address.kind == "cluster")
    fields["rename"] = renaming(prefix)
    if address.kind == "single":
        return fields | dict(zip(("host", "port"), address.nodes[0], strict=True) if address.nodes else ())
    # A connection that is opened asks for the address; until then it has none.
    return fields | {"host": "", "port": 0, "finder": _finder(settings, address, fields, secured, prefix)}


def _finder(
    settings: RedisSettings,
    address: RedisAddress,
    fields: dict[str, Any],
    secured: dict[str, Any],
    prefix: str,
) -> MasterFinder:
    asked: dict[str, Any] = {"ssl": address.tls, **secured}
    if address.master is not None:
        if settings.redis_sentinel_password_file is not None:
            asked["credential_provider"] = PasswordFile(settings.redis_sentinel_password_file)
        return SentinelFinder(address.nodes, address.master, asked)
    credentials = ("username", "password", "credential_provider")
    asked |= {name: fields[name] for name in credentials if name in fields}
    return ClusterFinder(address.nodes, slot_of(prefix), asked)


def _tls(settings: RedisSettings) -> dict[str, Any]:
    files = {
        "ssl_ca_certs": settings.redis_ca_file,
        "ssl_certfile": settings.redis_certificate_file,
        "ssl_keyfile": settings.redis_key_file,
    }
    return {"ssl_check_hostname": settings.redis_check_hostname} | {
        name: str(path) for name, path in files.items() if path is not None
    }
