"""Limits the rate of each client key: counts in this process, and shares the counts at every poll.

call ──▶ bucket of its key, in this process ──(every poll)──▶ the same bucket in Redis ◀── other gateways

So a call costs no round trip to Redis. A single gateway keeps the limit exactly. Several gateways together
may exceed it by the calls that arrive between two polls.
"""

from dataclasses import dataclass, field

from redis.asyncio import Redis

from gateway.admission.limits import Bucket, Rate
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

BUCKETS_AT_ONCE = 500
"""Redis serves nobody else while a script runs, so no script looks at more buckets than this."""
SHARE = """
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
"""


@dataclass(slots=True)
class _KeyUsage:
    """The bucket of one client key; Redis has not received the last `unshared_s` seconds of it yet."""

    bucket: Bucket = field(default_factory=Bucket)
    unshared_s: float = 0.0


class RateLimiter:
    """Limits the rate of each client key. A key takes memory only until its bucket is empty."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._name = name
        self._share = redis.register_script(SHARE)
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
        names, left = [keys.bucket(self._name, owner) for owner in usages], list[float]()
        try:
            for first in range(0, len(names), BUCKETS_AT_ONCE):
                page = slice(first, first + BUCKETS_AT_ONCE)
                left += await stored(self._share(names[page], [started - self._shared_at, *poured[page]]))
        except StorageUnavailable:
            for usage, seconds in zip(usages.values(), poured, strict=True):
                usage.unshared_s += seconds
            raise
        self._shared_at, now = started, clock.monotonic()
        for (owner, usage), seconds in zip(usages.items(), left, strict=True):
            # Redis does not know the units that were used here while it answered: they are `unshared_s`.
            known = now + float(seconds) + usage.unshared_s
            usage.bucket.empty_at = max(usage.bucket.empty_at, known)
            if usage.bucket.empty_at <= now:
                del self._usage[owner]
