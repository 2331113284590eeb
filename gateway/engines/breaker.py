"""Keeps calls away from a server that fails them, for a growing time; then one call tries it.

closed ──failures──▶ open ──time──▶ half-open ──a trial succeeds──▶ closed
                      ▲                 └────────a trial fails──┐
                      └─────────────────────────────────────────┘
"""

import random
import time
from dataclasses import dataclass
from typing import Literal

FAILURES = 3
"""In a row: one connection may break by itself."""
FIRST_S, LONGEST_S = 0.5, 10.0


@dataclass
class Breaker:
    """What the last calls to one server say of it, as this gateway sees it."""

    failures: int = 0
    openings: int = 0
    """In a row, without a success in between; each lasts twice as long as the one before."""
    opens_until: float = 0.0
    """time.monotonic(); 0 while it is closed."""
    trial: bool = False
    gone: bool = False
    """The last call found nobody: a server that merely fails calls is still better than none at all."""

    @property
    def state(self) -> Literal["closed", "half_open", "open"]:
        if not self.opens_until:
            return "closed"
        return "open" if time.monotonic() < self.opens_until else "half_open"

    @property
    def lets_through(self) -> bool:
        return self.state == "closed" or (self.state == "half_open" and not self.trial)

    def enter(self) -> bool:
        """A call goes to the server. Says whether it is the trial, which has to `leave`."""
        self.trial = self.trial or self.state == "half_open"
        return self.trial

    def leave(self) -> None:
        """The trial ended; where it said nothing, the next call may try."""
        self.trial = False

    def succeeded(self) -> None:
        self.failures = self.openings = 0
        self.opens_until, self.trial, self.gone = 0.0, False, False

    def failed(self, *, gone: bool) -> None:
        """`gone`: nobody listens there, so that no more failures need be waited for."""
        state, self.trial, self.gone = self.state, False, gone
        self.failures += 1
        # Calls that were in flight together fail together: that is one opening.
        if state == "half_open" or (state == "closed" and (gone or self.failures >= FAILURES)):
            length_s = min(FIRST_S * 2.0**self.openings, LONGEST_S)
            self.openings += 1
            self.opens_until = time.monotonic() + length_s * random.uniform(0.75, 1.25)

    def try_soon(self) -> None:
        """Something else says that the server is back."""
        if self.opens_until:
            self.opens_until = min(self.opens_until, time.monotonic())
