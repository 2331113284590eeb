"""A process as the trainer's lease names it: told from every other, of this boot and of those before."""

import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lease, since when."""

    token: str
    """Of this claim alone: the fence that every script of the reader compares."""
    host: str
    pid: int
    born: str
    """When the process began, in ticks since boot: a number that is used again is another process."""
    place: str
    """The boot and the process namespace that `pid` belongs to; empty where the system does not say."""
    since: float

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
        pid = os.getpid()
        since = datetime.now(UTC).timestamp()
        return cls(secrets.token_hex(16), socket.gethostname(), pid, _born(pid) or "", _place(), since)

    @property
    def dead(self) -> bool:
        """Whether the process is known to have ended. Of one in another place nothing is known."""
        return bool(self.place) and self.place == _place() and _born(self.pid) != self.born

    def __str__(self) -> str:
        return (
            f"{self.host}:{self.pid}, since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
        )


def _place() -> str:
    """Containers on one machine count their processes from 1, each for itself."""
    try:
        boot = BOOT.read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """None for a process that has ended, whether or not its parent has heard of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    return None if fields[0] in "ZX" else fields[19]
