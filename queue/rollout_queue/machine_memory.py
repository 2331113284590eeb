"""How much memory this machine has, or the container of this process; how a process ends for want of it."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class MachineMemory:
    """In bytes."""

    total: int
    free: int
    """What can be had without swapping; caches count as free."""


def machine_memory(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> MachineMemory:
    """Where the system does not tell what is free, all counts as free."""
    total, available = _of_machine(meminfo)
    limit, used = cgroup_memory(cgroups)
    if limit is None:
        return MachineMemory(total, available)
    return MachineMemory(min(total, limit), min(available, max(0, limit - used)))


def _of_machine(meminfo: Path) -> tuple[int, int]:
    try:
        lines = (line.split() for line in meminfo.read_text().splitlines())
        kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, LookupError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


def cgroup_memory(root: Path = CGROUPS) -> tuple[int | None, int]:
    """The memory limit of this container in bytes, None without one, and what it uses, caches left out."""
    try:
        text = (root / "memory.max").read_text().strip()
        if text == "max":
            return None, 0
        used = int((root / "memory.current").read_text())
        facts = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(text), max(0, used - int(facts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None, 0


def ending(exit_code: int) -> str:
    """How a process ended, in words. One that the system kills for want of memory gets SIGKILL."""
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL: by the system (memory? `dmesg` says so) or by hand"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
