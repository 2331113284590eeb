"""What each client key may use per minute, counted here at once and between gateways a moment later.

call ──▶ bucket of its key, in this process ──(every poll)──▶ the same bucket in Redis ◀── other gateways

So a call costs no round trip. One gateway is exact; several let in at most what arrives within one poll too
much.
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
    -- A clock that was set back meanwhile is to keep nobody waiting for it.
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
class _Account:
    """The bucket of one client key, and what of it the other gateways do not know yet."""

    bucket: Bucket = field(default_factory=Bucket)
    unshared_s: float = 0.0


class Allowance:
    """One limit, for every client key alike. Only keys with something in their bucket take memory."""

    def __init__(self, redis: Redis, name: str, rate: Rate) -> None:
        self.rate = rate
        self._name = name
        self._share = redis.register_script(SHARE)
        self._accounts: dict[str, _Account] = {}
        self._shared_at = time.monotonic()

    def wait_s(self, owner: str) -> float:
        """How long until this key may go on; 0 when it may."""
        account = self._accounts.get(owner)
        return 0.0 if account is None else account.bucket.wait_s(self.rate, time.monotonic())

    def use(self, owner: str, units: int) -> None:
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = _Account()
        account.unshared_s += account.bucket.pour(units, self.rate, time.monotonic())

    async def share(self) -> None:
        """Tell the other gateways what was used here, and hear what was used there.

        Raises StorageUnavailable; then this gateway goes on alone, and tells later.
        """
        accounts = dict(self._accounts)
        if not accounts:
            self._shared_at = time.monotonic()
            return
        began = time.monotonic()
        poured = [account.unshared_s for account in accounts.values()]
        for account in accounts.values():
            account.unshared_s = 0.0
        names = [keys.bucket(self._name, owner) for owner in accounts]
        try:
            left = await stored(self._share(names, [began - self._shared_at, *poured]))
        except StorageUnavailable:
            for account, seconds in zip(accounts.values(), poured, strict=True):
                account.unshared_s += seconds
            raise
        self._shared_at, now = began, time.monotonic()
        for (owner, account), seconds in zip(accounts.items(), left, strict=True):
            # What was poured while Redis answered is in the bucket here, and not yet in the one there.
            known = now + float(seconds) + account.unshared_s
            account.bucket.empty_at = max(account.bucket.empty_at, known)
            if account.bucket.empty_at <= now:
                del self._accounts[owner]
