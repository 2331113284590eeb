"""The trainer's lease on Redis: who may claim it, and what holds off whoever had it before.

    claim ──▶ weir:trainer_lease   who holds it; runs out unless renewed: decides who may *claim*
         └──▶ weir:trainer_fence   the token of the last who claimed; stays: decides who may *read*

A process that slept while its lease ran out goes on if nobody has claimed since, and is fenced off if
somebody has, even where that one has ended meanwhile: what it holds in memory is not true any more.
"""

from typing import Any, NamedTuple

import msgspec
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.holder import Holder
from rollout_queue.redis.scripts.lease import CLAIM, RELEASE, RENEW

LOST = f"another trainer has taken over {keys.STREAM}; this one writes nothing more"


class HeldLease(NamedTuple):
    """The lease is somebody else's."""

    by: Holder
    left_s: float
    """Until it runs out, unless it is renewed."""


class Lease:
    """One process' claim. Every method raises StorageUnavailable when Redis does not answer."""

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
        """None when the lease is ours now. That of a process known to be dead is taken at once."""
        found = self._claimed()
        while found and (by := _holder(found[0])).dead:
            found = self._claimed(dead=found[0])
        return HeldLease(by, max(0, found[1]) / 1000) if found else None

    def renew(self) -> None:
        """Raises LeaseLost when somebody has claimed it since."""
        with available():
            held: Any = self._renew([keys.LEASE, keys.FENCE], [self._packed, self.token, self._life_ms])
        if not held:
            raise LeaseLost(LOST)

    def release(self) -> None:
        """Let the next trainer begin at once."""
        with available():
            self._release([keys.LEASE], [self._packed])

    @property
    def _life_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _claimed(self, dead: bytes = b"") -> tuple[bytes, int] | None:
        """None, or the holder as it is stored and the milliseconds left to it."""
        with available():
            found: Any = self._claim(
                [keys.LEASE, keys.FENCE], [self._packed, self.token, self._life_ms, dead]
            )
        return found and (found[0], found[1])


def _holder(packed: bytes) -> Holder:
    """What another build, or a person, wrote there is not ours to judge: it runs out by itself."""
    try:
        return msgspec.json.decode(packed, type=Holder)
    except msgspec.DecodeError:
        return Holder("", packed.decode(errors="replace"), 0, "", "", 0.0)
