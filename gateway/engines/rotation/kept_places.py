"""Keeps the places in the line of calls whose wait has ended without a server, for when they come again."""

from collections import OrderedDict, deque

from rollout_queue import clock

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
