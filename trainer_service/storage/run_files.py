"""Small files beside the checkpoints, each replaced as a whole.

{directory}/VERSION          the highest version number that was ever given out
{directory}/HELD             why a guard holds the training, until an operator resumes it
{directory}/ATTEMPT          the groups that are computed now, and those that were when processes ended
{directory}/OUT_OF_MEMORY    there if a rank has ended because a pass did not fit into its memory
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from trainer_service.groups.reward_guard import Alarm
from trainer_service.storage.disk import written
from trainer_service.storage.files import sync_directory, write_atomically

VERSION = "VERSION"
HELD = "HELD"
ATTEMPT = "ATTEMPT"
OUT_OF_MEMORY = "OUT_OF_MEMORY"


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


class HoldNote(msgspec.Struct, frozen=True):
    """The alarm for which a guard holds the training."""

    alarm: Alarm
    version: int
    """The version of the weights that are undone. The restored ones have a newer number."""


class HoldFile:
    """Remembers over restarts that a guard holds the training."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / HELD

    def read(self) -> HoldNote | None:
        """None if the training is not held. Earlier releases wrote the reason alone."""
        if not self._path.exists():
            return None
        content = self._path.read_bytes()
        try:
            return msgspec.json.decode(content, type=HoldNote)
        except msgspec.DecodeError:
            return HoldNote(Alarm("", content.decode()), version=-1)

    def write(self, note: HoldNote) -> None:
        """Raises DiskTrouble."""
        with written("the reason of a pause", lambda: None):
            write_atomically(self._path, msgspec.json.encode(note))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        sync_directory(self._path.parent)


class AttemptNote(msgspec.Struct):
    """Names of groups, each the id of its first session."""

    computes: list[str] = []
    """What the process computes now."""
    alone: bool = False
    """Whether this is the trial of a single group."""
    ends: dict[str, int] = {}
    """How many times a process ended while it computed the group, together with others."""
    alone_ends: dict[str, int] = {}
    """The same for trials of the group alone."""
    halvings: int = 0
    """How many times the largest number of tokens of a micro-batch was halved."""
    row_tokens: int | None = None
    """The largest number of tokens of a row that fits into the memory, if a longer one did not."""
    trained_row_tokens: int = 0
    """The number of tokens of the longest row that was trained."""


class AttemptFile:
    """Notes what a process computes. It need not survive a power cut, so writing it takes no sync."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / ATTEMPT

    def read(self) -> AttemptNote:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=AttemptNote)
        except (FileNotFoundError, msgspec.DecodeError):  # a power cut may have left a part of it
            return AttemptNote()

    def write(self, note: AttemptNote) -> None:
        """A disk that refuses the note does not hinder the training."""
        aside = self._path.with_name(f".{ATTEMPT}.tmp")
        with suppress(OSError):
            aside.write_bytes(msgspec.json.encode(note))
            aside.replace(self._path)


class OutOfMemoryMark:
    """A file by which a rank that ends tells the next rank 0 the reason."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / OUT_OF_MEMORY

    def set(self) -> None:
        """A disk that refuses the mark does not hinder the end of the rank."""
        with suppress(OSError):
            self._path.touch()

    def take(self) -> bool:
        """Whether there was a mark. Removes it."""
        found = self._path.exists()
        self._path.unlink(missing_ok=True)
        return found
