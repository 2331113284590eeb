"""A ring of servers: the few of a large fleet among which the server for a session's calls is chosen.

Each server has points on the ring. A session's shortlist are the servers that own the next points after the
session's own. So a choice costs the same however large the fleet is, every gateway makes the same shortlist,
and a server that joins or leaves changes few shortlists.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator

from gateway.engines.placement.choice import affinity

POINTS = 16
"""How many points a server has. Its share of the shortlists varies by about 1 / sqrt(POINTS * the length)."""


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
