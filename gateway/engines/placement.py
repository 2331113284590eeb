"""Chooses the server for a call: the session's own, for its prefix cache, unless others are far less busy."""

import zlib
from collections.abc import Collection
from typing import Protocol, TypeVar

SLACK = 4
"""Calls in flight that a session's own server may have more than the least loaded one; half of the latter's
calls, if that is more."""


class Loaded(Protocol):
    """A server that can be chosen."""

    @property
    def id(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


L = TypeVar("L", bound=Loaded)


def choose_server(candidates: Collection[L], session_id: str) -> L | None:
    """The server for a call of the session; None if there are no candidates.

    Every gateway chooses the same server, also after a restart, unless load decides otherwise. A server that
    joins or leaves moves only its own share of the sessions (rendezvous hashing).
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
