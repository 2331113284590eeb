"""The trainer's lease on Redis: a lock that expires, so that one process at a time is the trainer.

    claim ──▶ weir:trainer_lease   the holder; expires unless renewed; decides who may *claim*
         └──▶ weir:trainer_fence   the token of the last claim; does not expire; decides who may *read*

A process that was suspended while its lease expired continues if no other process has claimed the lease
since. If another process has claimed it, the fence excludes the suspended process, even after the other one
has ended, because the data that the suspended process holds in memory is out of date.
"""

from typing import Any, NamedTuple

import msgspec
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.lease.holder import Holder
from rollout_queue.redis.scripts.lease import CLAIM, RELEASE, RENEW

LOST = f"another trainer has claimed {keys.STREAM}; this one writes nothing more"


class HeldLease(NamedTuple):
    """A lease that another process holds."""

    holder: Holder
    expires_in_s: float
    """Seconds until the lease expires, unless the holder renews it."""


class Lease:
    """The claim of one process. Every method raises StorageUnavailable when Redis does not answer."""

    def __init__(self, redis: Redis, lease_s: float) -> None:
        self.holder = Holder.here()
        self.lease_s = lease_s
        self._packed = msgspec.json.encode(self.holder)
        self._claim = redis.register_script(CLAIM)
        self._renew = redis.register_script(RENEW)
        self._release = redis.register_script(RELEASE)

    @property
    def token(self) -> str:
        return self.holder.token

    def claim(self) -> HeldLease | None:
        """Claim the lease. Returns None when this process holds it now, else the lease of the other holder.

        The lease of a process that is known to have ended is taken at once.
        """
        found = self._claimed()
        while found and (holder := _holder(found[0])).dead:
            found = self._claimed(dead=found[0])
        return HeldLease(holder, max(0, found[1]) / 1000) if found else None

    def renew(self) -> None:
        """Raises LeaseLost when another process has claimed the lease since."""
        with available():
            held: Any = self._renew([keys.LEASE, keys.FENCE], [self._packed, self.token, self._lease_ms])
        if not held:
            raise LeaseLost(LOST)

    def release(self) -> None:
        """Give the lease up, so that the next trainer can start at once."""
        with available():
            self._release([keys.LEASE], [self._packed])

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _claimed(self, dead: bytes = b"") -> tuple[bytes, int] | None:
        """None if this process holds the lease now, else its holder and the milliseconds until it expires."""
        with available():
            found: Any = self._claim(
                [keys.LEASE, keys.FENCE], [self._packed, self.token, self._lease_ms, dead]
            )
        return found and (found[0], found[1])


def _holder(packed: bytes) -> Holder:
    """The holder. Undecodable bytes give a holder that is never `dead`, so its lease has to expire."""
    try:
        return msgspec.json.decode(packed, type=Holder)
    except msgspec.DecodeError:
        return Holder("", packed.decode(errors="replace"), 0, "", "", 0.0)
