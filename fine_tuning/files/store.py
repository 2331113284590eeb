"""Uploaded files in a directory: the bytes in `{id}.data`, what is known of them in `{id}.json`.

A file is there once its `.json` is; `.data` without it is what a killed upload left.
"""

import logging
from pathlib import Path

import msgspec

from fine_tuning.errors import BadInput
from fine_tuning.settings import FineTuningLimits
from fine_tuning.whole_file import write_whole
from rollout_queue import clock
from rollout_queue.contract.ids import new_id

logger = logging.getLogger(__name__)


class StoredFile(msgspec.Struct, frozen=True):
    """A file object of OpenAI's API."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileStore:
    """The files of one service."""

    def __init__(self, directory: Path, limits: FineTuningLimits) -> None:
        self._directory, self._limits = directory, limits
        directory.mkdir(parents=True, exist_ok=True)
        read = [file for path in directory.glob("*.json") if (file := _file_in(path)) is not None]
        self._files = {each.id: each for each in sorted(read, key=lambda each: (each.created_at, each.id))}
        for path in directory.glob("*.data"):
            if not path.with_suffix(".json").exists():
                path.unlink()

    @property
    def newest_first(self) -> list[StoredFile]:
        return list(reversed(self._files.values()))

    def get(self, file_id: str, param: str | None = None) -> StoredFile:
        """Raises BadInput: 404, or 400 where `param` names the file."""
        if file_id not in self._files:
            raise BadInput(f"there is no file {file_id[:100]!r}", param, status=400 if param else 404)
        return self._files[file_id]

    def path(self, file: StoredFile) -> Path:
        return self._directory / f"{file.id}.data"

    def add(self, filename: str, purpose: str, content: bytes) -> StoredFile:
        """Raises BadInput."""
        if not content:
            raise BadInput("the file is empty", "file")
        if len(content) > self._limits.file_bytes:
            raise BadInput(f"the file is larger than {self._limits.file_bytes} bytes", "file", status=413)
        if len(self._files) >= self._limits.files:
            raise BadInput(f"{len(self._files)} files are stored: delete some", "file")
        stored = sum(each.bytes for each in self._files.values())
        if stored + len(content) > self._limits.stored_bytes:
            raise BadInput(f"the files would take more than {self._limits.stored_bytes} bytes", "file")
        file = StoredFile(f"file-{new_id()}", len(content), int(clock.now()), filename[:512], purpose)
        write_whole(self.path(file), content)
        write_whole(self._directory / f"{file.id}.json", msgspec.json.encode(file))
        self._files[file.id] = file
        return file

    def delete(self, file_id: str) -> None:
        """Raises BadInput. Jobs have copies of their own."""
        file = self.get(file_id)
        (self._directory / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)
        del self._files[file_id]


def _file_in(path: Path) -> StoredFile | None:
    """What is known of a file; None if that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredFile)
    except (msgspec.DecodeError, OSError) as error:
        logger.error("%s describes no file, and is left alone: %s", path, error)
        return None
