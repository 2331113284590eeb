"""The logs of a run: which there are, their last lines, and what is written to them from now on."""

import os
from dataclasses import dataclass
from pathlib import Path

from rollout_queue.config_file import meant
from weir.errors import StackError

MOST_READ_BYTES = 4 << 20
"""How much of a log is read at once."""


@dataclass
class LogEnd:
    """The end of a log, as far as it was read: whole lines only."""

    path: Path
    _read: int = 0

    def last(self, count: int) -> list[str]:
        """The last `count` lines."""
        self._read = max(0, self.path.stat().st_size - MOST_READ_BYTES)
        lines = self.new()
        return lines[-count:] if count else []

    def new(self) -> list[str]:
        """What was written since. A log that was begun anew is read from its beginning."""
        try:
            with self.path.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._read:
                    self._read = 0
                log.seek(self._read)
                whole, newline, _ = log.read(MOST_READ_BYTES).rpartition(b"\n")
        except FileNotFoundError:  # it is just begun anew
            return []
        self._read += len(whole + newline)
        return whole.decode(errors="replace").splitlines()


def logs_in(directory: Path, name: str | None) -> dict[str, LogEnd]:
    """The logs in the directory by name, or the one of this name. Raises StackError if there is none."""
    found = {each.stem: LogEnd(each) for each in sorted(directory.glob("*.log"))}
    if not found:
        raise StackError(
            f"there are no logs in {directory}: `weir up` writes them (--run-dir names another run)"
        )
    if name is not None and name not in found:
        raise StackError(f"there is no log of {name!r}{meant(name, found)}")
    return found if name is None else {name: found[name]}
