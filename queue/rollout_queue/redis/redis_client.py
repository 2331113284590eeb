"""Opens a service's client of Redis, as its settings say. This is the only place that does.

The master of a deployment's keys is found by asking sentinels, or the nodes of a cluster. Each new connection
asks again, so after a failover a connection that is opened anew leads to the new master. Nodes are asked one
after the other, each once and briefly, because some of them may be down. Only if none of them has answered in
time are they asked once more, patiently.

redis-py's connections are extended: they lead to the master, and replace the prefix of keys.

open ─▶ ask where the master is ─▶ connect, authenticate ─▶ ROLE: is it the master? ─▶ commands
  ▲                                                                                       │
  └──── a reply says that this server is not, or no longer, the master: close ◀───────────┘

Such a reply becomes redis-py's ConnectionError, because whoever gets it has to do the same as after a lost
connection: the command was not carried out, and the next connection leads elsewhere.
"""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from redis import ConnectionPool, DriverInfo, Redis
from redis import connection as blocking
from redis._parsers import _AsyncHiredisParser
from redis.asyncio import ConnectionPool as AsyncConnectionPool
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import connection as asynchronous
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel

from rollout_queue import clock
from rollout_queue.redis.availability import not_the_master
from rollout_queue.redis.key_names import Rename, renaming, slot_of, wire_prefix
from rollout_queue.redis.losses import CarefulAsyncRedis, CarefulRedis
from rollout_queue.redis.settings import Node, RedisAddress, RedisSettings, read_address


class PasswordFile(CredentialProvider):
    """Reads the file whenever a connection is opened, so that the password may be changed at any time."""

    def __init__(self, path: Path, user: str | None = None) -> None:
        self._path, self._user = path, user

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Raises redis' ConnectionError, so that a service waits for the file as it waits for Redis."""
        try:
            password = self._path.read_text(encoding="utf-8").strip("\r\n")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise RedisConnectionError(f"the password file {self._path} cannot be read: {reason}") from None
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


FindMaster = Callable[[], Node]
FindMasterAsync = Callable[[], Awaitable[Node]]
UNKNOWN_HOSTS = ("", "?", None)
"""What a node says in place of its own host, if it does not know it."""
PATIENCES_S = (0.25, 2.0)
"""How long a node may take to be connected and to answer: at first, and if none did."""
ONCE, ONCE_ASYNC = Retry(NoBackoff(), 0), AsyncRetry(NoBackoff(), 0)
"""redis-py's own attempts would come with pauses of seconds."""


class MasterFinder(Protocol):
    """Both methods raise RedisError if there is no master now."""

    def find(self) -> Node: ...

    async def find_async(self) -> Node: ...


class SentinelFinder:
    """Asks one sentinel after the other, first the one that answered last."""

    def __init__(self, nodes: tuple[Node, ...], master: str, fields: dict[str, Any]) -> None:
        """`fields` are those of a connection to a sentinel."""
        self._nodes, self._master, self._fields = nodes, master, fields

    def find(self) -> Node:
        brief, patient = (self._fields | _times(each) | {"retry": ONCE} for each in PATIENCES_S)
        try:
            return self._found(brief)
        except RedisError:
            return self._found(patient)

    async def find_async(self) -> Node:
        brief, patient = (self._fields | _times(each) | {"retry": ONCE_ASYNC} for each in PATIENCES_S)
        try:
            return await self._found_async(brief)
        except RedisError:
            return await self._found_async(patient)

    def _found(self, fields: dict[str, Any]) -> Node:
        # A client for each question: it is asked only when a connection is opened, and closed at once.
        sentinel: Any = Sentinel(self._nodes, sentinel_kwargs=fields)  # type: ignore[no-untyped-call]
        try:
            host, port = sentinel.discover_master(self._master)
            self._answered(sentinel)
        finally:
            for client in sentinel.sentinels:
                client.close()
        return str(host), int(port)

    async def _found_async(self, fields: dict[str, Any]) -> Node:
        sentinel: Any = AsyncSentinel(self._nodes, sentinel_kwargs=fields)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._master)
            self._answered(sentinel)
        finally:
            await sentinel.aclose()
        return str(host), int(port)

    def _answered(self, sentinel: Any) -> None:
        # redis-py puts the sentinel that has answered first. One whose host is down would cost a timeout each
        # time.
        answered = sentinel.sentinels[0].connection_pool.connection_kwargs
        node = (answered["host"], answered["port"])
        self._nodes = (node, *(each for each in self._nodes if each != node))


class ClusterFinder:
    """Asks one node after the other which of them has the slot."""

    def __init__(self, nodes: tuple[Node, ...], slot: int, fields: dict[str, Any]) -> None:
        """`nodes` are asked first; `fields` are those of a connection to a node."""
        self._configured, self._slot, self._fields = nodes, slot, fields
        self._known: tuple[Node, ...] = ()
        """The node that answered last, and those that it named."""

    def find(self) -> Node:
        why: Exception | None = None
        for (host, port), times in self._candidates():
            try:
                with Redis(host=host, port=port, retry=ONCE, **self._fields | times) as client:
                    reply: Any = client.execute_command("CLUSTER SLOTS")
            except (RedisError, OSError) as error:
                why = error
                continue
            if (found := self._owner(reply, (host, port))) is not None:
                return found
        raise self._nobody() from why

    async def find_async(self) -> Node:
        why: Exception | None = None
        for (host, port), times in self._candidates():
            try:
                async with AsyncRedis(
                    host=host, port=port, retry=ONCE_ASYNC, **self._fields | times
                ) as client:
                    reply: Any = await client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                why = error
                continue
            if (found := self._owner(reply, (host, port))) is not None:
                return found
        raise self._nobody() from why

    def _candidates(self) -> Iterator[tuple[Node, dict[str, float]]]:
        """The nodes, each first with little patience, and how long each may take."""
        for patience_s in PATIENCES_S:
            for node in dict.fromkeys((*self._known, *self._configured)):
                yield node, _times(patience_s)

    def _owner(self, ranges: list[list[Any]], asked: Node) -> Node | None:
        """The master of the slot: each range has its first and its last slot, its master and its replicas."""
        nodes = [[_node(each, asked[0]) for each in servers] for _, _, *servers in ranges]
        self._known = tuple(dict.fromkeys((asked, *(node for servers in nodes for node in servers))))
        for (first, last, *_), servers in zip(ranges, nodes, strict=True):
            if first <= self._slot <= last:
                return servers[0]
        return None

    def _nobody(self) -> RedisConnectionError:
        return RedisConnectionError(f"no node of the cluster says who has the slot {self._slot}")


def _times(patience_s: float) -> dict[str, float]:
    return {"socket_connect_timeout": patience_s, "socket_timeout": patience_s}


def _node(server: list[Any], asked: str) -> Node:
    host = server[0].decode() if isinstance(server[0], bytes) else server[0]
    return (asked if host in UNKNOWN_HOSTS else host), int(server[1])


def moved(host_error: str, reply: object) -> RedisConnectionError:
    return RedisConnectionError(f"{host_error} is not the master of this deployment's keys: {reply}")


def _require_master(role: Any, host_error: str) -> None:
    if role[0] not in (b"master", "master"):
        raise moved(host_error, "its role is another one")


class _Packer:
    """What redis-py's own packer makes of the arguments, with their keys renamed."""

    def __init__(self, packer: Any, rename: Rename) -> None:
        self._packer, self._rename = packer, rename

    def pack(self, *arguments: Any) -> Any:
        return self._packer.pack(*self._rename(arguments))


class Following(blocking.AbstractConnection):
    """The parts that the blocking connections share."""

    def __init__(self, *, finder: MasterFinder | None = None, rename: Rename | None = None, **fields: Any):
        """`finder` is asked before each attempt to connect; None: the address is fixed, and not checked."""
        self._finder, self._rename = finder, rename
        super().__init__(**fields)

    def _construct_command_packer(self, packer: Any) -> Any:
        made = super()._construct_command_packer(packer)  # type: ignore[no-untyped-call]
        return made if self._rename is None else _Packer(made, self._rename)

    def _connect(self) -> Any:
        if self._finder is not None:
            self.host, self.port = self._finder.find()
        return super()._connect()  # type: ignore[no-untyped-call,safe-super]

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health)
        if self._finder is not None:
            self.send_command("ROLE", check_health=False)  # type: ignore[no-untyped-call]
            _require_master(self.read_response(), self._host_error())  # type: ignore[no-untyped-call]

    def read_response(self, *given: Any, **named: Any) -> Any:
        try:
            return super().read_response(*given, **named)
        except ResponseError as error:
            if not not_the_master(error):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise moved(self._host_error(), error) from error  # type: ignore[no-untyped-call]


class PatientParser(_AsyncHiredisParser):
    """redis-py's parser, with a timeout where it has to wait for the socket: most answers of a pipeline are
    there already."""

    def on_connect(self, connection: "FollowingAsync") -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._within_s = connection.answer_within_s

    async def read_from_socket(self) -> bool:
        async with clock.real_timeout(self._within_s):
            return bool(await super().read_from_socket())  # type: ignore[no-untyped-call]


class FollowingAsync(asynchronous.AbstractConnection):
    """The parts that the asynchronous connections share.

    redis-py's own timeouts would count time in which this process stood still.
    """

    def __init__(
        self,
        *,
        finder: MasterFinder | None = None,
        rename: Rename | None = None,
        socket_timeout: float | None = None,
        socket_connect_timeout: float | None = None,
        **fields: Any,
    ):
        """`finder` is as in `Following`."""
        self._finder, self.rename = finder, rename
        self.answer_within_s = socket_timeout
        self._connect_within_s = socket_timeout if socket_connect_timeout is None else socket_connect_timeout
        super().__init__(
            socket_timeout=None, socket_connect_timeout=None, parser_class=PatientParser, **fields
        )

    def pack_command(self, *arguments: Any) -> list[bytes]:
        return super().pack_command(*(arguments if self.rename is None else self.rename(arguments)))

    async def _connect(self) -> None:
        if self._finder is not None:
            self.host, self.port = await self._finder.find_async()
        async with clock.real_timeout(self._connect_within_s):
            await super()._connect()  # type: ignore[no-untyped-call,safe-super]

    async def disconnect(self, nowait: bool = True, *given: Any, **named: Any) -> None:
        """Close the connection. Nobody waits until the other end has taken what was still to be sent."""
        await super().disconnect(True, *given, **named)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            async with clock.real_timeout(self.answer_within_s):
                await super().send_packed_command(command, check_health)
        except TimeoutError as error:
            raise RedisTimeoutError("Timeout writing to socket") from error

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        if self._finder is not None:
            await self.send_command("ROLE", check_health=False)
            _require_master(await self.read_response(), self._host_error())

    async def read_response(self, *given: Any, **named: Any) -> Any:
        try:
            return await super().read_response(*given, **named)
        except ResponseError as error:
            if not not_the_master(error):
                raise
            await self.disconnect()
            raise moved(self._host_error(), error) from error


class PlainConnection(Following, blocking.Connection):
    """Over TCP."""


class TlsConnection(Following, blocking.SSLConnection):
    """Over TLS."""


class SocketConnection(Following, blocking.UnixDomainSocketConnection):
    """Over a socket in the file system."""


class AsyncPlainConnection(FollowingAsync, asynchronous.Connection):
    """Over TCP."""


class AsyncTlsConnection(FollowingAsync, asynchronous.SSLConnection):
    """Over TLS."""


class AsyncSocketConnection(FollowingAsync, asynchronous.UnixDomainSocketConnection):
    """Over a socket in the file system."""


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
