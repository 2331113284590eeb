"""Identifies the process that holds the trainer's lease (`lease`), across reboots and containers."""

import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from rollout_queue import clock

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
