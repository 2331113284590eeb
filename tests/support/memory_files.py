"""Puts the files of tests in memory where there is room, because a checkpoint syncs each of its files."""

import os
import shutil
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 - pytest makes a directory in it that only this user can read
NEEDED_BYTES = 4 * 2**30


def keep_files_in_memory() -> None:
    """Call this before the first temporary directory is made. A directory set in the environment wins."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < NEEDED_BYTES:
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
