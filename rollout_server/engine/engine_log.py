"""The log of the engine: a file of bounded size. It may be copied to this service's own output.

engine ── appends ─▶ engine.log ──┬─ larger than the bound ─▶ engine.log.1, and engine.log begins anew
                                  └─ copied, if asked for ──▶ standard output (`docker logs`)
"""

import asyncio
import shutil
from pathlib import Path
from typing import BinaryIO

POLL_S = 0.5
MOST_COPIED = 2**20
"""Bytes that one poll copies at most, so that a flood of lines does not hold up the service."""


class EngineLog:
    """The file that every run of the engine appends to. The former run's is kept beside it, as `.1`."""

    def __init__(self, path: Path, most_bytes: int, copy: BinaryIO | None = None) -> None:
        self._path = path
        self._former = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        self._copy = copy
        self._copied = 0
        self._file = 0
        """Bytes of the file with this inode number that were copied."""
        self._former_file = inode_of(self._former)
        """The former log that needs no more copying."""

    async def keep(self) -> None:
        """Copy what is new, and bound the file."""
        await asyncio.to_thread(self._keep)

    def _keep(self) -> None:
        if not (inode := inode_of(self._path)):  # no engine has started
            return
        with self._path.open("r+b") as log:
            if inode != self._file:
                self._copy_former()
                self._copied, self._file = 0, inode
            self._copied += self._copy_from(log)
            if log.seek(0, 2) > self._most_bytes:
                # The engine has opened the file to append, so it goes on at the new end. What it writes
                # between these two lines is lost.
                self._tell_left_out(log)
                shutil.copyfile(self._path, self._former)
                log.truncate(0)
                self._copied = 0
                self._former_file = inode_of(self._former)

    def _copy_former(self) -> None:
        """Copy what the former run wrote at its end, or all of it if it ended before its log was read."""
        former = inode_of(self._former)
        if former == self._former_file:
            return
        if former != self._file:
            self._copied = 0
        with self._former.open("rb") as log:
            self._copied += self._copy_from(log)
            self._tell_left_out(log)
        self._former_file = former

    def _tell_left_out(self, log: BinaryIO) -> None:
        """Say in the copy how many bytes it lacks; they are in the former log."""
        left_out = log.seek(0, 2) - self._copied
        if self._copy is not None and left_out > 0:
            self._copy.write(b"[%d bytes of the engine's log are left out here]\n" % left_out)
            self._copy.flush()

    def _copy_from(self, log: BinaryIO) -> int:
        if self._copy is None:
            return 0
        log.seek(self._copied)
        piece = log.read(MOST_COPIED)
        self._copy.write(piece)
        self._copy.flush()
        return len(piece)


def inode_of(path: Path) -> int:
    """The inode number of a file; 0 if there is no file."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
