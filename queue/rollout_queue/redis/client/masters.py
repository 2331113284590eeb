"""Finds the master of a deployment's keys: by asking sentinels, or the nodes of a cluster.

Each new connection asks again, so after a failover a connection that is opened anew leads to the new master.
Nodes are asked one after the other, each once and briefly, because some of them may be down. Only if none of
them has answered in time are they asked once more, patiently.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from rollout_queue.redis.client.address import Node

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
