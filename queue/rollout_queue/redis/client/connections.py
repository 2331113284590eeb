"""redis-py's connections, extended: they lead to the master, and replace the prefix of keys.

open ─▶ ask where the master is ─▶ connect, authenticate ─▶ ROLE: is it the master? ─▶ commands
  ▲                                                                                       │
  └──── a reply says that this server is not, or no longer, the master: close ◀───────────┘

Such a reply becomes redis-py's ConnectionError, because whoever gets it has to do the same as after a lost
connection: the command was not carried out, and the next connection leads elsewhere.
"""

from typing import Any

from redis import connection as blocking
from redis.asyncio import connection as asynchronous
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from rollout_queue import clock
from rollout_queue.redis.client.departures import not_the_master
from rollout_queue.redis.client.masters import MasterFinder
from rollout_queue.redis.client.prefixes import Rename


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
        """`finder` is asked before each attempt to connect; None: the address is fixed, and not checked."""
        self._finder, self.rename = finder, rename
        self._answer_within_s = socket_timeout
        self._connect_within_s = socket_timeout if socket_connect_timeout is None else socket_connect_timeout
        super().__init__(socket_timeout=None, socket_connect_timeout=None, **fields)

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
            async with clock.real_timeout(self._answer_within_s):
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
            async with clock.real_timeout(self._answer_within_s):
                return await super().read_response(*given, **named)
        except TimeoutError as error:
            await self.disconnect()
            raise RedisTimeoutError(f"Timeout reading from {self._host_error()}") from error
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
