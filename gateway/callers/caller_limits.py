"""The arithmetic of limits: buckets, trends, and how long to wait; and what each client key has used."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from redis.asyncio import Redis

from gateway.errors import LimitReached
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import key_names
from rollout_queue.redis.lua import Script

LimitCode = Literal[
    "rate_limited",
    "token_budget",
    "insufficient_quota",
    "sessions_limit",
    "staleness_budget",
    "queue_full",
    "training_paused",
]

MAX_RETRY_S = 60.0
"""OpenAI's clients obey a `Retry-After` of up to a minute, so longer estimates are cut."""
SAMPLE_EVERY_S = 1.0
DEFAULT_RETRY_S = 5.0
"""When to retry if no trend gives an estimate."""
ROUNDING_S = 1e-6
"""A wait of at most this is a rounding error. So a caller that waited exactly as long as told is admitted."""


def limit_reached(code: LimitCode, message: str, wait_s: float) -> LimitReached:
    """The error, with the delay in whole seconds, rounded up so that a retry does not come too early."""
    retry_s = max(1, math.ceil(wait_s - ROUNDING_S))
    return LimitReached(f"{message}; try again in {retry_s} s", code=code, retry_s=retry_s)


def exhausted(message: str) -> LimitReached:
    """The error for a budget that does not refill: clients are told not to retry."""
    return LimitReached(message, code="insufficient_quota", retry_s=None)


@dataclass(frozen=True)
class Rate:
    """A permitted rate of use. The units of `burst_s` seconds may be used at once (see `Bucket`)."""

    per_minute: int
    burst_s: float

    @property
    def price_s(self) -> float:
        """How many seconds one unit takes to leave the bucket."""
        return 60 / self.per_minute

    @property
    def depth_s(self) -> float:
        """The size of the bucket: how many seconds a full one takes to become empty."""
        return max(self.burst_s, self.price_s)

    def units_left(self, full_s: float) -> int:
        """How many units fit into a bucket that takes `full_s` seconds to become empty."""
        return max(0, math.floor((self.depth_s - full_s + ROUNDING_S) / self.price_s))


@dataclass(slots=True)
class Bucket:
    """A leaky bucket: used units fill it, and leave it at a constant rate.

    Only the time at which it will be empty is stored (GCRA), so it needs no timer.
    """

    empty_at: float = 0.0

    def pour(self, units: float, rate: Rate, now: float) -> float:
        """Add used units. Returns how many seconds they take to leave the bucket."""
        poured_s = units * rate.price_s
        self.empty_at = max(self.empty_at, now) + poured_s
        return poured_s

    def wait_s(self, rate: Rate, now: float) -> float:
        """Seconds until one more unit fits; 0 if it does now."""
        over_s = max(self.empty_at - now, 0.0) + rate.price_s - rate.depth_s
        return over_s if over_s > ROUNDING_S else 0.0


@dataclass
class Trend:
    """The linear trend of a number over the last `window_s` seconds."""

    window_s: float = MAX_RETRY_S
    _samples: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, now: float, value: float) -> None:
        if len(self._samples) > 1 and now - self._samples[-2][0] < SAMPLE_EVERY_S:
            self._samples.pop()  # the new sample replaces it, so that about one a second is kept
        self._samples.append((now, value))
        while now - self._samples[0][0] > self.window_s:
            self._samples.popleft()

    def seconds_to_move(self, distance: float) -> float | None:
        """Seconds until the number has changed by `distance`; None if it does not move in that direction."""
        if not self._samples:
            return None
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        moved = last - first
        return distance * (ended - began) / moved if moved * distance > 0 else None


@dataclass
class StepTrend:
    """The trend of the trainer's version over the time in which it worked.

    A trainer that waits for rollouts makes its next step soon after they come. If the time of its waiting
    counted, clients would be told to wait as long as it has waited for them, and so it would wait on.
    """

    _busy_s: float = 0.0
    _noted_at: float | None = None
    _versions: Trend = field(default_factory=Trend)

    def note(self, now: float, version: float, busy: bool) -> None:
        """Note the version, and whether the trainer has worked since the note before."""
        if busy and self._noted_at is not None:
            self._busy_s += now - self._noted_at
        self._noted_at = now
        self._versions.note(self._busy_s, version)

    def seconds_to_move(self, steps: float) -> float | None:
        """Seconds that so many steps take; None if none was seen."""
        return self._versions.seconds_to_move(steps)


def retry_after_s(seconds: float | None) -> float:
    """The delay before a retry; `seconds` is the estimate of a trend, or None if there is none."""
    return DEFAULT_RETRY_S if seconds is None else min(seconds, MAX_RETRY_S)


BUCKETS_AT_ONCE = 500
"""Redis serves nobody else while a script runs, so no script looks at more buckets than this."""
SHARE = Script[list[bytes]]("""
-- KEYS: bucket…   ARGV: seconds since this gateway last shared; for each bucket, seconds poured since then
-- Returns, for each bucket, the seconds until it is empty. A bucket's value is: when empty, when written.
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local left = {}
for index, key in ipairs(KEYS) do -- bounded: BUCKETS_AT_ONCE
    local poured = tonumber(ARGV[index + 1])
    local empty_at, written_at = string.match(redis.call('GET', key) or '0 0', '(%S+) (%S+)')
    empty_at, written_at = tonumber(empty_at or 0), tonumber(written_at or 0)
    -- If Redis' clock was set back since then, the bucket is set back too: no key waits for the difference.
    local set_back = math.max(0, written_at - now)
    empty_at = empty_at - set_back
    if poured > 0 or set_back > 0 then
        if poured > 0 then empty_at = math.max(empty_at, now - ARGV[1]) + poured end
        local lives_ms = math.ceil((empty_at - now) * 1000)
        local value = string.format('%.6f %.6f', empty_at, now)
        if lives_ms > 0 then redis.call('SET', key, value, 'PX', lives_ms) else redis.call('DEL', key) end
    end
    left[index] = string.format('%.6f', empty_at - now)
end
return left
""")


@dataclass(slots=True)
class _KeyUsage:
    """The bucket of one client key; Redis has not received the last `unshared_s` seconds of it yet."""

    bucket: Bucket = field(default_factory=Bucket)
    unshared_s: float = 0.0


class RateLimiter:
    """Limits the rate of each client key: counts in this process, and shares the counts at every poll.

    call ──▶ bucket of its key, in this process ──(every poll)──▶ the same bucket in Redis ◀── other gateways

    So a call costs no round trip to Redis. A single gateway keeps the limit exactly. Several gateways
    together may exceed it by the calls that arrive between two polls. A key takes memory only until its
    bucket is empty.
    """

    def __init__(self, redis: Redis, name: str) -> None:
        self._name = name
        self._redis = redis
        self._usage: dict[str, _KeyUsage] = {}
        self._shared_at = clock.monotonic()

    def wait_s(self, owner: str, rate: Rate) -> float:
        """Seconds until the key may be used again; 0 if it may now."""
        usage = self._usage.get(owner)
        return 0.0 if usage is None else usage.bucket.wait_s(rate, clock.monotonic())

    def full_s(self, owner: str) -> float:
        """Seconds until the key's bucket is empty."""
        usage = self._usage.get(owner)
        return 0.0 if usage is None else max(0.0, usage.bucket.empty_at - clock.monotonic())

    def use(self, owner: str, units: int, rate: Rate) -> None:
        """Count units that a key used."""
        usage = self._usage.get(owner)
        if usage is None:
            usage = self._usage[owner] = _KeyUsage()
        usage.unshared_s += usage.bucket.pour(units, rate, clock.monotonic())

    async def share(self) -> None:
        """Add this gateway's counts to Redis, and read those of the other gateways.

        Raises StorageUnavailable. This gateway then counts alone, and shares its counts at a later poll.
        """
        usages = dict(self._usage)
        if not usages:
            self._shared_at = clock.monotonic()
            return
        started = clock.monotonic()
        poured = [usage.unshared_s for usage in usages.values()]
        for usage in usages.values():
            usage.unshared_s = 0.0
        names, left = [key_names.bucket(self._name, owner) for owner in usages], list[bytes]()
        try:
            for first in range(0, len(names), BUCKETS_AT_ONCE):
                page = slice(first, first + BUCKETS_AT_ONCE)
                arguments = [started - self._shared_at, *poured[page]]
                left += await SHARE.run(self._redis, names[page], arguments)
        except StorageUnavailable:
            for usage, seconds in zip(usages.values(), poured, strict=True):
                usage.unshared_s += seconds
            raise
        self._shared_at, now = started, clock.monotonic()
        for (owner, usage), left_s in zip(usages.items(), left, strict=True):
            # Redis does not know the units that were used here while it answered: they are `unshared_s`. That
            # this process has stood still meanwhile holds nobody up, so the time of the question counts.
            known = started + float(left_s) + usage.unshared_s
            usage.bucket.empty_at = max(usage.bucket.empty_at, known)
            if usage.bucket.empty_at <= now:
                del self._usage[owner]
