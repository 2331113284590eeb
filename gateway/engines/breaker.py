"""A circuit breaker for one server: after failures it gets no calls for a growing time, then one trial call.

closed ──failures──▶ open ──time──▶ half-open ──a trial succeeds──▶ closed
                      ▲                 └────────a trial fails──┐
                      └─────────────────────────────────────────┘
"""

import random
from dataclasses import dataclass
from typing import Literal

from rollout_queue import clock

FAILURES = 3
"""Consecutive failures that open the breaker. A single one may come from a broken connection."""
FIRST_S, LONGEST_S = 0.5, 10.0
"""How long the breaker stays open: at first, and at most."""


@dataclass
class Breaker:
    """The state of the breaker, from the results of this gateway's calls to the server."""

    failures: int = 0
    openings: int = 0
    """How often the breaker has opened since the last success; each time it stays open twice as long."""
    open_until: float = 0.0
    """clock.monotonic(); 0 while the breaker is closed."""
    trial: bool = False
    """A trial call is in flight."""
    unreachable: bool = False
    """The last failure was that no connection could be made. `Fleet` never chooses such a server while its
    breaker is open."""

    @property
    def state(self) -> Literal["closed", "half_open", "open"]:
        if not self.open_until:
            return "closed"
        return "open" if clock.monotonic() < self.open_until else "half_open"

    @property
    def allows_call(self) -> bool:
        return self.state == "closed" or (self.state == "half_open" and not self.trial)

    def enter(self) -> bool:
        """A call begins. Returns whether it is the trial; the trial must call `leave` at its end."""
        self.trial = self.trial or self.state == "half_open"
        return self.trial

    def leave(self) -> None:
        """The trial ended; if it neither succeeded nor failed, the next call is the trial."""
        self.trial = False

    def succeeded(self) -> None:
        self.failures = self.openings = 0
        self.open_until, self.trial, self.unreachable = 0.0, False, False

    def failed(self, *, unreachable: bool) -> None:
        """A call failed. A server that is `unreachable` opens the breaker at once."""
        state, self.trial, self.unreachable = self.state, False, unreachable
        self.failures += 1
        # When a server fails, its calls in flight fail together. They open the breaker only once.
        if state == "half_open" or (state == "closed" and (unreachable or self.failures >= FAILURES)):
            length_s = min(FIRST_S * 2.0**self.openings, LONGEST_S)
            self.openings += 1
            self.open_until = clock.monotonic() + length_s * random.uniform(0.75, 1.25)

    def try_soon(self) -> None:
        """Permit a trial now: the server's status says that it is ready again."""
        if self.open_until:
            self.open_until = min(self.open_until, clock.monotonic())
