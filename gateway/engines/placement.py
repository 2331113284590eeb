"""Which server takes a call: the session's own, for its prefix cache, unless others have far less to do."""

import zlib
from collections.abc import Collection
from typing import Protocol, TypeVar

SLACK = 4
"""Calls in flight that a session's own server may have beyond the least loaded; or half as many again."""


class Loaded(Protocol):
    """What there is to weigh."""

    @property
    def id(self) -> str: ...
    @property
    def in_flight(self) -> int: ...


L = TypeVar("L", bound=Loaded)


def place_call(candidates: Collection[L], session_id: str) -> L | None:
    """The same answer at every gateway, and after every restart, as long as load does not speak against it.

    A server that joins or leaves moves only its own share of the sessions.
    """
    if len(candidates) < 2:
        return next(iter(candidates), None)
    own = min(candidates, key=lambda server: _affinity(session_id, server.id))
    least = min(server.in_flight for server in candidates)
    if own.in_flight <= least + max(SLACK, least // 2):
        return own
    return min(candidates, key=lambda server: (server.in_flight, _affinity(session_id, server.id)))


def _affinity(session_id: str, server_id: str) -> int:
    """The same number everywhere, as Python's own hash is not; mixed, since CRCs of like names are alike."""
    return zlib.crc32(f"{session_id} {server_id}".encode()) * 0x9E3779B97F4A7C15 % 2**64
