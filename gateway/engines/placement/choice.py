"""Chooses the server for a call: the one that has the prefix of the call in its cache, unless it is too busy.

prefix's server ──not too busy──▶ it      else: session ──hash──▶ its own server ──not too busy──▶ it
                                                                              else: the least busy one
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

SLACK = 4
"""A server is too busy for a call if it has over SLACK calls more than the others' mean. If the mean is
large, half of it takes the place of SLACK."""


class Adapter(NamedTuple):
    """A LoRA adapter of an engine: its name there, and the version that it is."""

    name: str
    version: int


class Loaded(Protocol):
    """A server that can be chosen."""

    @property
    def id(self) -> str: ...
    @property
    def load(self) -> int:
        """How many calls it has, as far as is known."""
        ...


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


def most_load(mean: float) -> float:
    """How many calls a server may have before calls that prefer it go elsewhere; `mean` is the others'."""
    return mean + max(SLACK, mean / 2)


def choose_server(candidates: Sequence[L], session_id: str, mean: float | None = None) -> L | None:
    """The server for a call of the session; None if there are no candidates.

    A hash of session and server decides (rendezvous hashing). So every gateway chooses the same server, also
    after a restart, and a server that joins or leaves moves only its own share of the sessions. If that
    server is too busy, the least busy candidate takes the call. `mean` is the mean load of all servers, if
    the candidates are only some of them.
    """
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    own = min(candidates, key=lambda server: affinity(session_id, server.id))
    if mean is None:
        mean = (sum(server.load for server in candidates) - own.load) / (len(candidates) - 1)
    if own.load <= most_load(mean):
        return own
    return min(candidates, key=lambda server: (server.load, affinity(session_id, server.id)))


def affinity(one: str, other: str) -> int:
    """A hash of both, below 2**64, that is equal in every process; multiplied, because CRCs of similar names
    are similar."""
    return zlib.crc32(f"{one} {other}".encode()) * 0x9E3779B97F4A7C15 % 2**64
