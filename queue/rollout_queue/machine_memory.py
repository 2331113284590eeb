"""How much memory this machine has, or the container in which this process runs."""

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineMemory:
    """In bytes."""

    total: int
    free: int
    """What can be had without swapping; caches count as free."""


def machine_memory() -> MachineMemory:
    machine = psutil.virtual_memory()
    limit, used = cgroup_memory()
    if limit is None:
        return MachineMemory(machine.total, machine.available)
    return MachineMemory(min(machine.total, limit), min(machine.available, max(0, limit - used)))


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
