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
from redis.exceptions import ResponseError

from rollout_queue import clock
from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.client.losses import note_loss
from rollout_queue.redis.lease.holder import Holder
from rollout_queue.redis.scripts import functions
from rollout_queue.redis.scripts.lease import CLAIM, RELEASE, RENEW

LOST = f"another trainer has claimed {keys.STREAM}; this one writes nothing more"
UNFENCED = f"Redis has lost {keys.FENCE}, which the trainer writes again if it still holds the lease"
UNKNOWN = (
    f"Redis has lost {keys.FENCE}, and this trainer's lease had run out: another trainer may have trained "
    "since, so start this one again"
)


def refused(error: ResponseError) -> LeaseLost | StorageUnavailable | None:
    """What a script means that has compared the fence; None for any other error."""
    said = str(error)
    if said.startswith(functions.LOST):
        return LeaseLost(LOST)
    return StorageUnavailable(UNFENCED) if said.startswith(functions.UNFENCED) else None


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
        self._redis = redis
        self._held_until = float("-inf")
        """By the monotonic clock: until then no other process can have claimed the lease."""

    @property
    def token(self) -> str:
        return self.holder.token

    def claim(self) -> HeldLease | None:
        """Claim the lease. Returns None when this process holds it now, else the lease of the other holder.

        The lease of a process that is known to have ended is taken at once.
        """
        began = clock.monotonic()
        found = self._claimed()
        while found and (holder := _holder(found[0])).dead:
            found = self._claimed(dead=found[0])
        if found:
            return HeldLease(holder, max(0, found[1]) / 1000)
        self._held_until = began + self.lease_s
        return None

    def renew(self) -> None:
        """Raises LeaseLost when another process has claimed the lease since, or may have.

        If Redis has lost the fence while this process held the lease, the fence is written again.
        """
        began = clock.monotonic()
        holds = began < self._held_until
        with available():
            held: Any = self._renew(
                [keys.LEASE, keys.FENCE], [self._packed, self.token, self._lease_ms, int(holds)]
            )
        if not held:
            raise LeaseLost(LOST if holds else UNKNOWN)
        self._held_until = began + self.lease_s
        if held == 2:
            said = f"{keys.FENCE} was gone: the trainer, which held the lease, has written it again"
            note_loss(self._redis, keys.FENCE, said)

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
