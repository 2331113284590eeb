"""Rates per client key: counted in this process at once, and shared with other gateways at every poll.

call ──▶ bucket of its key, in this process ──(every poll)──▶ the same bucket in Redis ◀── other gateways

So a call costs no round trip. One gateway is exact; several together may admit too many calls, at most those
that arrive within one poll.
"""

import time
from dataclasses import dataclass, field

from redis.asyncio import Redis

from gateway.admission.limits import Bucket, Rate
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

SHARE = """
-- KEYS: bucket…   ARGV: seconds since this gateway last shared, seconds poured since, by bucket…
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local left = {}
for index, key in ipairs(KEYS) do
    local poured = tonumber(ARGV[index + 1])
    local empty_at, told_at = string.match(redis.call('GET', key) or '0 0', '(%S+) (%S+)')
    empty_at, told_at = tonumber(empty_at or 0), tonumber(told_at or 0)
    -- If the clock was set back meanwhile, nobody waits for that time.
    local set_back = math.max(0, told_at - now)
    empty_at = empty_at - set_back
    if poured > 0 or set_back > 0 then
        if poured > 0 then empty_at = math.max(empty_at, now - ARGV[1]) + poured end
        local lives_ms = math.ceil((empty_at - now) * 1000)
        local told = string.format('%.6f %.6f', empty_at, now)
        if lives_ms > 0 then redis.call('SET', key, told, 'PX', lives_ms) else redis.call('DEL', key) end
    end
    left[index] = string.format('%.6f', empty_at - now)
end
return left
"""


@dataclass(slots=True)
class _KeyUsage:
    """The bucket of one client key, and the part of it that was not shared yet."""

    bucket: Bucket = field(default_factory=Bucket)
    unshared_s: float = 0.0


class RateLimiter:
    """One rate, which applies to each client key. Only keys with a bucket that is not empty take memory."""

    def __init__(self, redis: Redis, name: str, rate: Rate) -> None:
        self.rate = rate
        self._name = name
        self._share = redis.register_script(SHARE)
        self._usage: dict[str, _KeyUsage] = {}
        self._shared_at = time.monotonic()

    def wait_s(self, owner: str) -> float:
        """Seconds until the key may be used again; 0 if it may now."""
        usage = self._usage.get(owner)
        return 0.0 if usage is None else usage.bucket.wait_s(self.rate, time.monotonic())

    def use(self, owner: str, units: int) -> None:
        """Count units that a key used."""
        usage = self._usage.get(owner)
        if usage is None:
            usage = self._usage[owner] = _KeyUsage()
        usage.unshared_s += usage.bucket.pour(units, self.rate, time.monotonic())

    async def share(self) -> None:
        """Add what was used here to Redis, and read what was used at other gateways.

        Raises StorageUnavailable; this gateway then counts alone, and shares its counts later.
        """
        usages = dict(self._usage)
        if not usages:
            self._shared_at = time.monotonic()
            return
        started = time.monotonic()
        poured = [usage.unshared_s for usage in usages.values()]
        for usage in usages.values():
            usage.unshared_s = 0.0
        names = [keys.bucket(self._name, owner) for owner in usages]
        try:
            left = await stored(self._share(names, [started - self._shared_at, *poured]))
        except StorageUnavailable:
            for usage, seconds in zip(usages.values(), poured, strict=True):
                usage.unshared_s += seconds
            raise
        self._shared_at, now = started, time.monotonic()
        for (owner, usage), seconds in zip(usages.items(), left, strict=True):
            # What was used while Redis answered is in this bucket, but not yet in the one in Redis.
            known = now + float(seconds) + usage.unshared_s
            usage.bucket.empty_at = max(usage.bucket.empty_at, known)
            if usage.bucket.empty_at <= now:
                del self._usage[owner]
