"""Chooses the server for a call: the one that has its first tokens in its cache, unless it is too busy.

cached there ──not too busy──▶ that server     else: session ──hash──▶ its own server ──not too busy──▶ it
                                                                                      else: the least busy one
A large fleet is not searched for each call: the server that has the cache is looked at first, then
the shortlist of the session (`Ring`), and all servers only if no server of it can take the call.
"""

import zlib
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from gateway.counters import FleetFigures
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.generate_request import ANY, AllowedVersions
from rollout_queue import clock
from rollout_queue.contract.serving_plan import ServingPlan

SLACK = 4
"""A server is too busy for a call if it has over SLACK calls more than the others' mean. If the mean is
large, half of it takes the place of SLACK."""
POINTS = 16
"""How many points a server has. Its share of the shortlists varies by about 1 / sqrt(POINTS * the length)."""


SHORTLIST = 16
"""How many servers a shortlist has. In a fleet of no more servers, all are looked at."""
WIDENINGS = 4
"""How many shortlists are looked at while each of their servers is too busy."""
MEAN_EVERY_S = 0.1
"""How often the mean load of a large fleet is computed."""

Placement = Literal["prefix", "first", "flushed", "busy", "full", "unable", "gone", "failover"]
"""Why a call went where it went. `prefix`: to the server that sampled the turn which the call continues.
`first`: the call continues no turn. `flushed`: that server has loaded another version since, which emptied
its cache. Else it did not take the call: it was too busy (`busy`), at its limit of calls (`full`), not in
rotation for this call (`unable`) or not in the fleet any more (`gone`). `failover`: the call was moved away
from a server that failed."""


class WantedServer(NamedTuple):
    """What a call asks of a server."""

    session_id: str
    allowed: AllowedVersions = ANY
    avoid: str = ""
    """The id of a server that takes the call only if no other can now."""
    cached_at: str = ""
    """The id of the server that sampled the turn which the call continues."""
    cached_version: int | None = None
    """The version with which it ended that turn."""
    owner: str = ""

    def cached_by(self, server: FleetServer) -> bool:
        """Whether the server may have the prefix in its cache: a load empties it, and an adapter's prefixes
        belong to its version."""
        serves = server.version if self.allowed.version is None else self.allowed.version
        return server.id == self.cached_at and self.cached_version in (None, serves)


class Rotation:
    """Chooses the server of each call. `Fleet` changes `servers`."""

    def __init__(self, servers: Mapping[str, FleetServer]) -> None:
        self.servers = servers
        self.ring = Ring()
        self.plan = ServingPlan()
        self.placed: Counter[str] = Counter()
        """How many calls were placed, by reason (`Placement`)."""
        self._admitted, self._pinned = self.plan.versions, frozenset[str]()
        self._mean, self._mean_at = 0.0, float("-inf")

    def set_plan(self, plan: ServingPlan) -> None:
        self.plan, self._admitted = plan, plan.versions
        self._pinned = frozenset(pin.server for pin in plan.pins)

    def admits(self, server: FleetServer) -> bool:
        """Whether its version may answer calls that allow any."""
        # Policies are not pushed to bare engines, so their version does not matter.
        admitted = not self._admitted or server.version in self._admitted or server.ahead
        return server.registration.url is None or (admitted and server.id not in self._pinned)

    def choose(self, wanted: WantedServer) -> FleetServer | None:
        """The server that takes a call now, if any."""
        found = self._caching_server(wanted) or self._own_server(wanted)
        if found is None and wanted.avoid:  # no other has room
            found = self._own_server(wanted._replace(avoid=""))
        return found

    def place(self, wanted: WantedServer) -> FleetServer | None:
        """`choose`, and count why."""
        server = self.choose(wanted)
        if server is not None:
            self.placed[self._reason(wanted, server)] += 1
        return server

    def takes(self, server: FleetServer, wanted: WantedServer) -> bool:
        """Whether a server can take a call now, without looking at others."""
        allowed = wanted.allowed
        if allowed.version is not None:
            serves = server.can_answer(allowed.version, allowed.adapter)
        else:
            serves = server.version == allowed.prefers if allowed.prefers is not None else self.admits(server)
        return serves and server.takes_calls and server.has_room and server.id != wanted.avoid

    def figures(self, waiting: int) -> FleetFigures:
        """What is measured of the servers, as they reported it last; `waiting` calls wait for one."""
        ready = [server for server in self.servers.values() if server.state == "ready"]
        loads = [server.engine_load for server in ready if server.engine_load is not None]
        usages = [load.kv_usage for load in loads if load.kv_usage is not None]
        limits = [server.limit for server in ready if server.limit is not None]
        return FleetFigures(
            placed=self.placed,
            waiting=waiting,
            running=sum(load.running for load in loads),
            queued=sum(load.waiting for load in loads),
            kv_usage=sum(usages) / len(usages) if usages else None,
            limit=sum(limits) if limits else None,
        )

    def _caching_server(self, wanted: WantedServer) -> FleetServer | None:
        server = self.servers.get(wanted.cached_at)
        if server is None or not (wanted.cached_by(server) and self.takes(server, wanted)):
            return None
        return None if self._is_too_busy(server) else server

    def _own_server(self, wanted: WantedServer) -> FleetServer | None:
        if len(self.servers) <= SHORTLIST:
            return choose_server(
                self._with_room(self.candidates(wanted.allowed, wanted.avoid)), wanted.session_id
            )
        self.ring.follow(self.servers.keys())
        mean = self._mean_load()
        seen: dict[str, FleetServer] = {}
        for widening in range(WIDENINGS):
            ids = self.ring.shortlist(wanted.session_id, SHORTLIST, widening)
            listed = (server for each in ids if (server := self.servers.get(each)) is not None)
            able = [server for server in listed if self.takes(server, wanted)]
            chosen = choose_server(able, wanted.session_id, mean)
            if chosen is not None and chosen.load <= most_load(mean):
                return chosen
            seen |= {server.id: server for server in able}
        if not seen:
            seen = {
                server.id: server for server in self._with_room(self.candidates(wanted.allowed, wanted.avoid))
            }
        return choose_server(list(seen.values()), wanted.session_id)

    def _reason(self, wanted: WantedServer, chosen: FleetServer) -> Placement:
        if wanted.avoid:
            return "failover"
        if not wanted.cached_at:
            return "first"
        if wanted.cached_by(chosen):
            return "prefix"
        if (server := self.servers.get(wanted.cached_at)) is None:
            return "gone"
        if not wanted.cached_by(server):
            return "flushed"
        if not server.takes_calls:
            return "unable"
        return "busy" if server.has_room else "full"

    def _is_too_busy(self, server: FleetServer) -> bool:
        count = len(self.servers)
        if count == 1:
            return False
        mean = self._mean_load()
        others = (mean * count - server.load) / (count - 1) if count <= SHORTLIST else mean
        return server.load > most_load(max(0.0, others))

    def _mean_load(self) -> float:
        """The mean load of the servers that can take calls; of a large fleet, as it was a moment ago."""
        now = clock.monotonic()
        if len(self.servers) <= SHORTLIST or not 0 <= now - self._mean_at < MEAN_EVERY_S:
            loads = [server.load for server in self.servers.values() if server.state == "ready"]
            self._mean, self._mean_at = sum(loads) / len(loads) if loads else 0.0, now
        return self._mean

    @staticmethod
    def _with_room(servers: Iterable[FleetServer]) -> list[FleetServer]:
        return [server for server in servers if server.has_room]

    # All servers

    def replacements(self, allowed: AllowedVersions, server: FleetServer) -> list[FleetServer]:
        """The servers from which one for a call would be chosen if `server` were gone."""
        others = {name: each for name, each in self.servers.items() if each is not server}
        return self.candidates(allowed, server.id, others)

    def candidates(
        self, allowed: AllowedVersions, avoid: str, among: Mapping[str, FleetServer] | None = None
    ) -> list[FleetServer]:
        """The servers from which the one for a call is chosen; those of a canary only if no other can."""
        servers = self.servers if among is None else among
        if (version := allowed.version) is not None:
            return self._able(servers, lambda server: server.can_answer(version, allowed.adapter), avoid)
        preferred = [s for s in servers.values() if s.version == allowed.prefers and s.takes_calls]
        found = [server for server in preferred if server.id != avoid] if allowed.prefers is not None else []
        if found := found or self._able(servers, self.admits, avoid):
            return found
        canary = self.plan.active_canary
        return self._able(servers, lambda server: server.version == canary.version, avoid) if canary else []

    @staticmethod
    def _able(
        servers: Mapping[str, FleetServer], serves: Callable[[FleetServer], bool], avoid: str
    ) -> list[FleetServer]:
        """The servers with such a version that can take a call.

        These are left out unless no other is left: servers with an open breaker, the server `avoid`, and
        servers that load weights, because calls wait there. A server that refused its last connection is left
        out in any case while its breaker is open, and a silent one until its engine responds.
        """
        able = [
            server
            for server in servers.values()
            if server.state in ("ready", "loading")
            and not (server.drained or server.silent)
            and serves(server)
        ]
        sound = [server for server in able if server.breaker.allows_call]
        able = sound or [server for server in able if not server.breaker.unreachable]
        if len(able) < 2:
            return able
        able = [server for server in able if server.id != avoid] or able
        return [server for server in able if server.state == "ready" and not server.pushing] or able


class Ring:
    """The points of all servers, sorted."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._ids: set[str] = set()

    def follow(self, ids: Collection[str]) -> None:
        """Have the points of exactly these servers. Cheap if their number is as before: the owner calls
        `add` and `discard` for servers that it exchanges."""
        if len(ids) != len(self._ids):
            for left in self._ids.difference(ids):
                self.discard(left)
            for new in set(ids) - self._ids:
                self.add(new)

    def add(self, server_id: str) -> None:
        if server_id not in self._ids:
            self._ids.add(server_id)
            for point in _points(server_id):
                insort(self._points, point)

    def discard(self, server_id: str) -> None:
        if server_id in self._ids:
            self._ids.remove(server_id)
            for point in _points(server_id):
                del self._points[bisect_left(self._points, point)]

    def shortlist(self, session_id: str, length: int, widening: int = 0) -> list[str]:
        """The ids of `length` different servers, or of all if there are fewer. Each `widening` of a session
        has another shortlist."""
        length = min(length, len(self._ids))
        found: dict[str, None] = {}
        if not length:
            return []
        start = bisect_right(self._points, (affinity(session_id, f"#{widening}"), ""))
        for index in range(start, start + len(self._points)):
            found[self._points[index % len(self._points)][1]] = None
            if len(found) == length:
                break
        return list(found)


def _points(server_id: str) -> Iterator[tuple[int, str]]:
    return ((affinity(server_id, f"point {number}"), server_id) for number in range(POINTS))


class Loaded(Protocol):
    """A server that can be chosen."""

    @property
    def id(self) -> str: ...
    @property
    def load(self) -> int:
        """How many calls it has, as far as is known."""
        ...


L = TypeVar("L", bound=Loaded)


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
