"""The calls that wait for a server, because none can take them or each is at its limit of calls.

Client keys take turns, whatever versions their calls allow: a key with many calls holds no other key's call
up. The calls of one key that allow the same versions go in the order of their arrival. A server that has room
again is given to the first that it can take: calls that were moved away from it let others pass. So a server
is looked for once, however many calls wait. A call of a session whose last wait ended without a server has
its former place among its key's calls.
"""

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.generate_request import AllowedVersions
from gateway.fleet.placement import Rotation, WantedServer
from rollout_queue import clock

AGAIN_S = 0.05
"""For so long after a search without a result, a call that arrives causes no other search."""


@dataclass(eq=False)
class _Waiting:
    wanted: WantedServer
    since: float
    given: asyncio.Future[FleetServer]
    gone: bool = False
    """Whether it has left its line."""


class CallQueue:
    """Gives servers to calls that wait. The rotation chooses them."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._lines: dict[str, dict[AllowedVersions, deque[_Waiting]]] = {}
        """By owner, the next one first, and by the versions that calls allow."""
        self._last_owner = ""
        """Whose call got the last server."""
        self._waiting_for: Counter[AllowedVersions] = Counter()
        """How many calls wait, by the versions that they allow."""
        self._kept = KeptPlaces()
        self._fruitless_at = -math.inf

    def __len__(self) -> int:
        return self._waiting_for.total()

    def waits_for(self, allowed: AllowedVersions) -> bool:
        """Whether calls wait that allow the same versions."""
        return allowed in self._waiting_for

    @property
    def kept_places(self) -> int:
        return len(self._kept)

    async def wait(self, wanted: WantedServer, timeout_s: float) -> FleetServer:
        """A server for the call, when its turn has come. The caller lets the call enter it at once.

        Raises TimeoutError.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(wanted, self._kept.take(wanted.session_id), loop.create_future())
        self._join(waiting)
        if self._waiting_for[wanted.allowed] > 1 and clock.monotonic() - self._fruitless_at >= AGAIN_S:
            self.serve()  # a server may have become able without a sign, as when its breaker's time is over
        try:
            async with clock.timeout(timeout_s):
                server = await waiting.given
        except BaseException as error:
            self._give_up(waiting)
            last = self._rotation.place(wanted) if isinstance(error, TimeoutError) else None
            if last is None:
                self._kept.keep(wanted.session_id, waiting.since)
                raise
            return last
        server.promised -= 1
        return server

    def serve(self) -> None:
        """Give servers to as many calls as possible."""
        hopeless: set[AllowedVersions] = set()
        while (found := self._next(hopeless)) is not None:
            self._give(*found)
        if self._lines:
            self._fruitless_at = clock.monotonic()

    def freed(self, server: FleetServer) -> None:
        """A call has left the server: the first that the server can take gets its place."""
        if not self._lines:
            return
        while (first := self._first(server)) is not None:
            if self._give(first, server):
                return
        heads = (line[0] for lines in self._lines.values() for line in lines.values())
        if any(head.wanted.avoid == server.id for head in heads):
            self.serve()  # they were moved away from this server, and come back if no other has room

    def _first(self, server: FleetServer) -> _Waiting | None:
        """The first call that the server can take."""
        for lines in self._in_turn():
            heads = (
                next((each for each in line if each.wanted.avoid != server.id), line[0])
                for line in lines.values()
            )
            able = [each for each in heads if self._rotation.takes(server, each.wanted)]
            if able:
                return min(able, key=lambda waiting: waiting.since)
        return None

    def _in_turn(self) -> Iterable[dict[AllowedVersions, deque[_Waiting]]]:
        """The lines of each owner, the next one first. Who came last, or had the last turn, is at the end."""
        if self._last_owner in self._lines:
            self._lines[self._last_owner] = self._lines.pop(self._last_owner)
        return self._lines.values()

    def _next(self, hopeless: set[AllowedVersions]) -> tuple[_Waiting, FleetServer] | None:
        """The next call that a server can take. Adds the versions for which there is none to `hopeless`."""
        for lines in self._in_turn():
            for allowed, line in lines.items():
                if allowed in hopeless:
                    continue
                if (server := self._rotation.place(line[0].wanted)) is not None:
                    return line[0], server
                hopeless.add(allowed)
        return None

    def _give(self, waiting: _Waiting, server: FleetServer) -> bool:
        """Whether the call takes the server: one that was cancelled, but has not run since, does not."""
        self._leave(waiting)
        if waiting.given.cancelled():
            return False
        self._last_owner = waiting.wanted.owner
        server.promised += 1
        waiting.given.set_result(server)
        return True

    def _join(self, waiting: _Waiting) -> None:
        wanted = waiting.wanted
        line = self._lines.setdefault(wanted.owner, {}).setdefault(wanted.allowed, deque())
        place = len(line)
        while place and line[place - 1].since > waiting.since:
            place -= 1
        line.insert(place, waiting)
        self._waiting_for[wanted.allowed] += 1

    def _give_up(self, waiting: _Waiting) -> None:
        """The call waits no more: its time is over, or its caller has left."""
        if waiting.given.done() and not waiting.given.cancelled():
            waiting.given.result().promised -= 1
            self.serve()
        else:
            self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting.gone:
            return
        waiting.gone = True
        owner, allowed = waiting.wanted.owner, waiting.wanted.allowed
        lines = self._lines[owner]
        lines[allowed].remove(waiting)
        if not lines[allowed]:
            del lines[allowed]
        if not lines:
            del self._lines[owner]
        self._waiting_for[allowed] -= 1
        if not self._waiting_for[allowed]:
            del self._waiting_for[allowed]


COMES_AGAIN_WITHIN_S = 30.0
"""So long a place is kept. SDKs and runners make a refused call again after 0.5 to 20 s."""
MOST_SESSIONS = 4096
MOST_OF_A_SESSION = 16


class KeptPlaces:
    """The times since which calls wait, by session; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, deque[tuple[float, float]]] = OrderedDict()
        """Of each call that left: since when it had waited, and when it left."""

    def __len__(self) -> int:
        return sum(map(len, self._left.values()))

    def keep(self, session_id: str, since: float) -> None:
        """A call that has waited since then leaves without a server."""
        places = self._left.pop(session_id, None) or deque(maxlen=MOST_OF_A_SESSION)
        places.append((since, clock.monotonic()))
        self._left[session_id] = places
        oldest = next(iter(self._left.values()))
        if len(self._left) > MOST_SESSIONS or _is_over(oldest[-1][1]):
            self._left.popitem(last=False)

    def take(self, session_id: str) -> float:
        """Since when a call of the session that comes now counts as waiting: its first place, or now."""
        if (places := self._left.pop(session_id, None)) is None:
            return clock.monotonic()
        kept = sorted(place for place in places if not _is_over(place[1]))
        if len(kept) > 1:
            self._left[session_id] = deque(kept[1:], MOST_OF_A_SESSION)
        return kept[0][0] if kept else clock.monotonic()


def _is_over(left_at: float) -> bool:
    return clock.monotonic() - left_at > COMES_AGAIN_WITHIN_S
