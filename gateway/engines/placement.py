"""Placement: chooses the server for a call. The calls of a session go to one server, which caches its prefix.

A call goes to another server only while the session's own server is far busier than the least busy one.
"""

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

SLACK = 4
"""A session keeps its own server as long as this server has at most SLACK more calls in flight than the least
busy one. If the least busy server has many calls, half of their number takes the place of SLACK."""


class Adapter(NamedTuple):
    """A LoRA adapter of an engine: its name there, and the version that it is."""

    name: str
    version: int


class Loaded(Protocol):
    """A server that can be chosen."""

    @property
    def id(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


L = TypeVar("L", bound=Loaded)


@dataclass(frozen=True)
class Wish:
    """Which versions may answer a call."""

    version: int | None = None
    """If set, only this one."""
    adapter: str | None = None
    """The name of the adapter whose version that is; None for the fleet's policy."""
    prefers: int | None = None
    """If set, this one as long as a server can answer with it, and else any that the fleet admits."""


ANY = Wish()


def choose_server(candidates: Collection[L], session_id: str) -> L | None:
    """The server for a call of the session; None if there are no candidates.

    A hash of session and server decides (rendezvous hashing). So every gateway chooses the same server, also
    after a restart, and a server that joins or leaves moves only its own share of the sessions.
    """
    if len(candidates) < 2:
        return next(iter(candidates), None)
    own = min(candidates, key=lambda server: _affinity(session_id, server.id))
    least = min(server.in_flight for server in candidates)
    if own.in_flight <= least + max(SLACK, least // 2):
        return own
    return min(candidates, key=lambda server: (server.in_flight, _affinity(session_id, server.id)))


def _affinity(session_id: str, server_id: str) -> int:
    """A hash that is equal in every process; multiplied, because CRCs of similar names are similar."""
    return zlib.crc32(f"{session_id} {server_id}".encode()) * 0x9E3779B97F4A7C15 % 2**64
