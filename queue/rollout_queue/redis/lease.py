"""The trainer's lease on Redis: a lock that expires, so that one process at a time is the trainer.

    claim ──▶ weir:trainer_lease   the holder; expires unless renewed; decides who may *claim*
         └──▶ weir:trainer_fence   the token of the last claim; does not expire; decides who may *read*

A process that was suspended while its lease expired continues if no other process has claimed the lease
since. If another process has claimed it, the fence excludes the suspended process, even after the other one
has ended, because the data that the suspended process holds in memory is out of date.

A Holder identifies the process that holds the lease, across reboots and containers.
"""

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from redis import Redis

from rollout_queue import clock
from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.redis import key_names, lua
from rollout_queue.redis.losses import note_loss
from rollout_queue.redis.lua import Argument, Script, T
from rollout_queue.redis.settings import NO_REPLICAS, Replication

CLAIM = Script[list[Any] | None]("""
-- KEYS: lease, fence   ARGV: holder, token, lease in ms, a holder that is dead or ''
-- Returns false if the caller holds the lease now, else its holder and the ms until it expires.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[4] and holder ~= ARGV[1] then return {holder, redis.call('PTTL', KEYS[1])} end
-- A full Redis has to accept a trainer, which frees memory. It refuses a script whose first write is SET, and
-- accepts DEL, so DEL comes first.
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
return false
""")

RENEW = Script[int]("""
-- KEYS: lease, fence   ARGV: holder, token, lease in ms, 1 if the caller's lease has not run out, or 0
-- Returns 1; 2 if Redis had lost the fence, which is there again; 0 if the caller is no longer the trainer.
-- Without a fence, nobody knows whether another trainer has claimed the lease since the caller's ran out.
local fence, holder = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[1])
if not fence then
    if holder and holder ~= ARGV[1] then return 0 end
    redis.call('DEL', KEYS[1]) -- a full Redis accepts this, and then refuses no later write
    if ARGV[4] == '0' then
        redis.call('SET', KEYS[2], 'nobody')
        return 0
    end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
    redis.call('SET', KEYS[2], ARGV[2])
    return 2
end
if fence ~= ARGV[2] then return 0 end
if redis.call('PEXPIRE', KEYS[1], ARGV[3]) == 0 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3]) end
return 1
""")

RELEASE = Script[None]("""
-- KEYS: lease   ARGV: holder
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
""")


BOOT = Path("/proc/sys/kernel/random/boot_id")


class Holder(msgspec.Struct, frozen=True):
    """A process that holds or held the lease. Stored in Redis as JSON under these names."""

    token: str
    """Random. A claim makes it the fence, and every script of the trainer compares it with the fence."""
    host: str
    pid: int
    born: str
    """When the process started, in clock ticks since boot. A later process with the same pid has another
    value."""
    place: str
    """The boot id and the process namespace that `pid` belongs to; empty if the system has no /proc."""
    since: float
    """When the process prepared its claim, seconds since the epoch."""

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
        pid = os.getpid()
        since = clock.now()
        return cls(secrets.token_hex(16), socket.gethostname(), pid, _born(pid) or "", _place(), since)

    @property
    def dead(self) -> bool:
        """Whether the process is known to have ended. Always False for another boot or namespace."""
        return bool(self.place) and self.place == _place() and _born(self.pid) != self.born

    def __str__(self) -> str:
        return (
            f"{self.host}:{self.pid}, since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
        )


def _place() -> str:
    """The boot id and the process namespace of this process. Each container has its own namespace."""
    try:
        boot = BOOT.read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """When the process started; None for one that has ended, zombies included."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may contain blanks and parentheses
    return None if fields[0] in "ZX" else fields[19]


HELD = (key_names.LEASE, key_names.FENCE)
"""The keys that a claim writes."""
LOST = f"another trainer has claimed {key_names.STREAM}; this one writes nothing more"
UNFENCED = f"Redis has lost {key_names.FENCE}, which the trainer writes again if it still holds the lease"
UNKNOWN = (
    f"Redis has lost {key_names.FENCE}, and this trainer's lease had run out: another trainer may have "
    "trained since, so start this one again"
)


class FencedScript(Script[T]):
    """A script of the trainer's end: it begins with FENCED, which compares the fence."""

    def __init__(self, text: str) -> None:
        super().__init__(lua.FENCED + text)

    def run_as(
        self,
        token: str,
        redis: Redis,
        keys: Sequence[str] = (),
        arguments: Sequence[Argument] = (),
        replication: Replication = NO_REPLICAS,
    ) -> T:
        """What the script answers a trainer with this token. Raises StorageUnavailable, and LeaseLost when
        another trainer has claimed the lease since."""
        try:
            return self.run_now(redis, [key_names.FENCE, *keys], [token, *arguments], replication)
        except StorageUnavailable as error:
            said = str(error.__cause__)
            if said.startswith(lua.LOST):
                raise LeaseLost(LOST) from error
            if said.startswith(lua.UNFENCED):
                raise StorageUnavailable(UNFENCED) from error
            raise


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
        held = RENEW.run_now(self._redis, HELD, [self._packed, self.token, self._lease_ms, int(holds)])
        if not held:
            raise LeaseLost(LOST if holds else UNKNOWN)
        self._held_until = began + self.lease_s
        if held == 2:
            said = f"{key_names.FENCE} was gone: the trainer, which held the lease, has written it again"
            note_loss(self._redis, key_names.FENCE, said)

    def release(self) -> None:
        """Give the lease up, so that the next trainer can start at once."""
        RELEASE.run_now(self._redis, [key_names.LEASE], [self._packed])

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _claimed(self, dead: bytes = b"") -> tuple[bytes, int] | None:
        """None if this process holds the lease now, else its holder and the milliseconds until it expires."""
        found = CLAIM.run_now(self._redis, HELD, [self._packed, self.token, self._lease_ms, dead])
        return None if found is None else (found[0], found[1])


def _holder(packed: bytes) -> Holder:
    """The holder. Undecodable bytes give a holder that is never `dead`, so its lease has to expire."""
    try:
        return msgspec.json.decode(packed, type=Holder)
    except msgspec.DecodeError:
        return Holder("", packed.decode(errors="replace"), 0, "", "", 0.0)
