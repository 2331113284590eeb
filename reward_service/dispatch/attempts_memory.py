"""What the dispatcher remembers of sessions: those in work, to be tried again, or to be left alone.

The gateway knows which sessions wait for a reward, so a restart loses only the counts of failed attempts, and
dead letters are then tried again. Sessions that the gateway's list no longer has are forgotten.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_queue import clock

SHOWN_LETTERS = 100


@dataclass(frozen=True)
class DeadLetter:
    """A session whose grader failed to the last attempt."""

    unit: str
    """The session's id, or `group/` and the group's id."""
    rule: str
    attempts: int
    reason: str
    at: float
    """Seconds since the epoch."""


@dataclass
class RememberedSession:
    """A session that was not rewarded."""

    failures: int = 0
    due_at: float = 0.0
    """When it may be tried again, on the monotonic clock."""
    left_alone: bool = False
    """It is a dead letter, or no grader has an opinion."""
    sessions: set[str] = field(default_factory=set)
    """The sessions of the unit that waited when it was left alone. A further one has a group graded again."""
    dead: bool = False
    seen_in: int = 0
    """The last reading of the list that had it."""


class DispatchMemory:
    """Bounded by `most` sessions besides those in work."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queued: dict[str, set[str]] = {}
        """The units that wait for a worker, each with its sessions that are known to wait for a reward."""
        self._handled: dict[str, set[str]] = {}
        """The units that are graded, each with those that were known when that began."""
        self._remembered: dict[str, RememberedSession] = {}
        self._reading = 0
        self._letters: deque[DeadLetter] = deque(maxlen=SHOWN_LETTERS)

    @property
    def in_work(self) -> int:
        return len(self._queued) + len(self._handled)

    @property
    def remembered(self) -> int:
        return len(self._remembered)

    @property
    def letters(self) -> Sequence[DeadLetter]:
        """The last dead letters."""
        return list(self._letters)

    def begin_reading(self) -> None:
        """A new reading of the list begins."""
        self._reading += 1

    def end_reading(self) -> None:
        """The list was read to its end: forget the sessions that it did not have."""
        gone = [
            session_id
            for session_id, each in self._remembered.items()
            if each.seen_in != self._reading and not self._works_on(session_id)
        ]
        for session_id in gone:
            del self._remembered[session_id]

    def takes(self, unit: str, session_id: str) -> bool:
        """Whether to grade this unit now, because the list has this session of it."""
        known = self._remembered.get(unit)
        if known is not None:
            known.seen_in = self._reading
        if unit in self._queued:
            self._queued[unit].add(session_id)
        if self._works_on(unit):
            return False
        if known is None:
            return len(self._remembered) + self.in_work < self._most
        if known.left_alone:
            return session_id not in known.sessions
        return known.due_at <= clock.monotonic()

    def queue(self, unit: str, session_id: str) -> None:
        """It waits for a worker. A unit that was left alone has a new session, and begins anew."""
        self._queued[unit] = {session_id}
        known = self._remembered.get(unit)
        if known is not None and known.left_alone:
            known.left_alone = known.dead = False
            known.failures = 0

    def begin(self, unit: str) -> None:
        """A worker grades it. Sessions that the list has from now on may not be graded with it."""
        self._handled[unit] = self._queued.pop(unit, set())

    def end(self, unit: str) -> None:
        """It is no longer in work; if the list still has it, it may be taken again."""
        self._handled.pop(unit, None)

    def failures(self, session_id: str) -> int:
        """The failed attempts so far."""
        known = self._remembered.get(session_id)
        return known.failures if known else 0

    def forget(self, session_id: str) -> None:
        """It was rewarded, or is gone."""
        self._remembered.pop(session_id, None)

    def failed(self, session_id: str, pause_s: float) -> None:
        """Count a failed attempt; the next one may begin after the pause."""
        self._known(session_id).failures += 1
        self.postpone(session_id, pause_s)

    def postpone(self, session_id: str, pause_s: float) -> None:
        """The next attempt may begin after the pause."""
        self._known(session_id).due_at = clock.monotonic() + pause_s

    def leave_alone(self, session_id: str) -> None:
        """Its grader has no opinion."""
        known = self._known(session_id)
        known.left_alone = True
        known.sessions |= self._handled.get(session_id, set())

    def bury(self, letter: DeadLetter) -> None:
        """Its grader failed to the last attempt."""
        known = self._known(letter.unit)
        known.left_alone = known.dead = True
        known.sessions |= self._handled.get(letter.unit, set())
        self._letters.append(letter)

    def revive(self) -> int:
        """Try all dead letters again. Returns how many there are."""
        dead = [session_id for session_id, each in self._remembered.items() if each.dead]
        for session_id in dead:
            del self._remembered[session_id]
        self._letters.clear()
        return len(dead)

    def _works_on(self, unit: str) -> bool:
        return unit in self._queued or unit in self._handled

    def _known(self, session_id: str) -> RememberedSession:
        known = self._remembered.setdefault(session_id, RememberedSession())
        known.seen_in = self._reading
        return known
