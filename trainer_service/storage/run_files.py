"""Two small files beside the checkpoints, each replaced as a whole.

{directory}/VERSION    the highest version number that was ever given out
{directory}/HELD       why a guard holds the training, until an operator resumes it
"""

from pathlib import Path

from trainer_service.storage.disk import written
from trainer_service.storage.files import sync_directory, write_atomically

VERSION = "VERSION"
HELD = "HELD"


class VersionFile:
    """Gives out version numbers, each number once."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / VERSION

    def reserve(self, above: int) -> int:
        """A version number greater than `above` that was never given out. After a crash, repeated steps make
        other weights than the lost ones, so they must not get the same numbers. Raises DiskTrouble."""
        given = int(self._path.read_bytes()) if self._path.exists() else 0
        number = max(above, given) + 1
        with written(f"version number {number}", lambda: None):
            write_atomically(self._path, str(number).encode())
        return number


class HoldFile:
    """Remembers over restarts that a guard holds the training."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / HELD

    def read(self) -> str | None:
        """Why the training is held; None if it is not."""
        return self._path.read_text(encoding="utf-8") if self._path.exists() else None

    def write(self, reason: str) -> None:
        """Raises DiskTrouble."""
        with written("the reason of a pause", lambda: None):
            write_atomically(self._path, reason.encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)
