"""Which servers a gateway asks for their status at a poll.

A server whose state may change soon is asked at every poll: one that is not ready, whose calls fail, or that
some gateway has load a version. The others are asked in turn, so that a gateway asks few a second however
large the fleet is.
"""

import heapq
from collections.abc import Iterable

from gateway.engines.fleet_server import FleetServer

STATUS_PER_S = 200.0
"""How many servers in a steady state a gateway process asks a second, at most."""
LONGEST_S = 5.0
"""So many seconds of these requests are made up for, after a pause."""


class StatusSchedule:
    """Notes when each server was asked."""

    def __init__(self) -> None:
        self._at = float("-inf")

    def due(self, servers: Iterable[FleetServer], now: float) -> list[FleetServer]:
        """The servers to ask at `now`, by clock.monotonic()."""
        budget = int(STATUS_PER_S * min(now - self._at, LONGEST_S))
        self._at = now
        due: list[FleetServer] = []
        steady: list[FleetServer] = []
        for server in servers:
            (steady if server.steady else due).append(server)
        due += heapq.nsmallest(budget, steady, key=lambda server: server.asked_at)
        for server in due:
            server.asked_at = now
        return due
