"""The arithmetic of limits, free of clocks and storage: buckets, trends, and the 429 that follows."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from gateway.errors import LimitReached

LimitCode = Literal["rate_limited", "token_budget", "sessions_limit", "staleness_budget", "queue_full"]

LONGEST_GUESS_S = 60.0
"""OpenAI's clients obey a `Retry-After` up to a minute; a guess beyond that is none."""
SAMPLE_EVERY_S = 1.0
UNKNOWN_S = 5.0
"""When to come again where nothing moved in that time."""
ROUNDING_S = 1e-6
"""Who waited exactly as long as told is let in, whatever the last digit of the clock."""


def limit_reached(code: LimitCode, message: str, wait_s: float) -> LimitReached:
    """The refusal, with the delay in whole seconds, rounded up so that a retry does not come too early."""
    retry_s = max(1, math.ceil(wait_s - ROUNDING_S))
    return LimitReached(f"{message}; try again in {retry_s} s", code=code, retry_s=retry_s)


@dataclass(frozen=True)
class Rate:
    """So many units a minute, of which `burst_s` seconds' worth may come at once."""

    per_minute: int
    burst_s: float

    @property
    def price_s(self) -> float:
        """How long one unit takes to flow off."""
        return 60 / self.per_minute

    @property
    def depth_s(self) -> float:
        return max(self.burst_s, self.price_s)


@dataclass(slots=True)
class Bucket:
    """A leaky bucket, kept as the moment at which it is empty (GCRA): one number, and no timer."""

    empty_at: float = 0.0

    def pour(self, units: float, rate: Rate, now: float) -> float:
        """Add what was used; how many seconds that takes to flow off."""
        poured_s = units * rate.price_s
        self.empty_at = max(self.empty_at, now) + poured_s
        return poured_s

    def wait_s(self, rate: Rate, now: float) -> float:
        """How long until one more unit fits; 0 when it does."""
        over_s = max(self.empty_at - now, 0.0) + rate.price_s - rate.depth_s
        return over_s if over_s > ROUNDING_S else 0.0


@dataclass
class Trend:
    """Where a number is going, by the samples of the last `window_s` seconds."""

    window_s: float = LONGEST_GUESS_S
    _samples: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, now: float, value: float) -> None:
        if len(self._samples) > 1 and now - self._samples[-2][0] < SAMPLE_EVERY_S:
            self._samples.pop()  # the newest counts at once, and yet few are kept
        self._samples.append((now, value))
        while now - self._samples[0][0] > self.window_s:
            self._samples.popleft()

    def seconds_to_move(self, distance: float) -> float | None:
        """How long it takes to change by `distance`; None while it does not move that way."""
        if not self._samples:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        moved = last - first
        return distance * (ended - began) / moved if moved * distance > 0 else None


def guess(seconds: float | None) -> float:
    """When to come again, by a trend or the lack of one."""
    return UNKNOWN_S if seconds is None else min(seconds, LONGEST_GUESS_S)
