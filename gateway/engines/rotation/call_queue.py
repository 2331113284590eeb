"""The calls that wait for a server, because none can take them or each is at its limit of calls.

Calls with the same wish take their turns in the order of their arrival. A server that has room again is given
to the one that waited longest. So a server is looked for once, however many calls wait. A call of a session
whose last wait ended without a server has its former place.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.engines.fleet_server import FleetServer
from gateway.engines.placement.choice import Wish
from gateway.engines.rotation.kept_places import KeptPlaces
from gateway.engines.rotation.rotation import WantedServer
from rollout_queue import clock

AGAIN_S = 0.05
"""For so long after a search without a result, a call that arrives causes no other search."""


@dataclass(eq=False)
class _Waiting:
    wanted: WantedServer
    since: float
    given: asyncio.Future[FleetServer]


class CallQueue:
    """Gives servers to calls that wait. `place` chooses one."""

    def __init__(self, place: Callable[[WantedServer], FleetServer | None]) -> None:
        self._place = place
        self._waiting: dict[Wish, deque[_Waiting]] = {}
        self._kept = KeptPlaces()
        self._fruitless_at = -math.inf

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waits_for(self, wish: Wish) -> bool:
        """Whether calls with the same wish wait."""
        return wish in self._waiting

    @property
    def kept_places(self) -> int:
        return len(self._kept)

    async def wait(self, wanted: WantedServer, timeout_s: float) -> FleetServer:
        """A server for the call, when its turn has come. The caller lets the call enter it at once.

        Raises TimeoutError.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(wanted, self._kept.take(wanted.session_id), loop.create_future())
        queue = self._waiting.setdefault(wanted.wish, deque())
        place = len(queue)
        while place and queue[place - 1].since > waiting.since:
            place -= 1
        queue.insert(place, waiting)
        if len(queue) > 1 and clock.monotonic() - self._fruitless_at >= AGAIN_S:
            self.serve()  # a server may have become able without a sign, as when its breaker's time is over
        try:
            async with clock.timeout(timeout_s):
                server = await waiting.given
        except BaseException as error:
            self._leave(waiting)
            last = self._place(wanted) if isinstance(error, TimeoutError) else None
            if last is None:
                self._kept.keep(wanted.session_id, waiting.since)
                raise
            return last
        server.promised -= 1
        return server

    def serve(self) -> None:
        """Give servers to as many calls as possible."""
        for wish in list(self._waiting):
            queue = self._waiting[wish]
            while queue and (server := self._place(queue[0].wanted)) is not None:
                self._give(queue.popleft(), server)
            if queue:
                self._fruitless_at = clock.monotonic()
            self._forget_empty(wish)

    def freed(self, server: FleetServer, takes: Callable[[FleetServer, WantedServer], bool]) -> None:
        """A call has left the server: the first that the server can take gets its place."""
        if not self._waiting:
            return
        able = [queue[0] for queue in self._waiting.values() if takes(server, queue[0].wanted)]
        if able:
            first = min(able, key=lambda waiting: waiting.since)
            self._waiting[first.wanted.wish].popleft()
            self._forget_empty(first.wanted.wish)
            self._give(first, server)

    def _give(self, waiting: _Waiting, server: FleetServer) -> None:
        server.promised += 1
        waiting.given.set_result(server)

    def _leave(self, waiting: _Waiting) -> None:
        """The call waits no more: its time is over, or its caller has left."""
        wish = waiting.wanted.wish
        if waiting.given.done() and not waiting.given.cancelled():
            waiting.given.result().promised -= 1
            self.serve()
        elif wish in self._waiting and waiting in self._waiting[wish]:
            self._waiting[wish].remove(waiting)
            self._forget_empty(wish)

    def _forget_empty(self, wish: Wish) -> None:
        if not self._waiting[wish]:
            del self._waiting[wish]
