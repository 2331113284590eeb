"""Gives each rollout server a directory of weights that no other server uses, even if they share a disk.

The operating system keeps the claim until the process ends, however it ends.
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rollout_server.settings import RolloutServerSettings

MOST_SERVERS = 1024


class DirectoryTaken(Exception):
    """Another process uses the directory."""


@dataclass(frozen=True)
class WeightsClaim:
    """A directory that belongs to this process for as long as this object lives."""

    directory: Path
    lock: TextIO


def claim_weights(settings: RolloutServerSettings) -> WeightsClaim:
    """Claim the directory of the server's id. A server without an id gets the first free directory.

    Raises DirectoryTaken, OSError.
    """
    root = settings.weights_dir.absolute()
    root.mkdir(parents=True, exist_ok=True)
    if settings.id is not None:
        claim = _claimed(root / settings.id)
        if claim is None:
            raise DirectoryTaken(
                f"another rollout server uses the weights in {root / settings.id}: give each server its own "
                "rollout_server.id, or none"
            )
        return claim
    for number in range(MOST_SERVERS):
        if claim := _claimed(root / f"server-{number}"):
            return claim
    raise DirectoryTaken(f"{MOST_SERVERS} rollout servers use the directories in {root}")


def _claimed(directory: Path) -> WeightsClaim | None:
    lock = directory.with_name(f"{directory.name}.lock").open("a", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return WeightsClaim(directory, lock)
