"""Uploaded files in a directory: the bytes in `{id}.data`, what is known of them in `{id}.json`; and their
rows.

A file is there once its `.json` is; `.data` without it is what a killed upload left. Both are whole after a
crash, also of the machine.

A training file has JSON objects, one a line, each with `messages` and whatever its grader reads:

{"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}      `answer` is {{item.answer}}
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fine_tuning.errors import BadInput, BadRow
from fine_tuning.settings import FineTuningLimits
from rollout_queue import clock
from rollout_queue.contract.ids import new_id
from rollout_queue.foreign_json import read_json


def write_whole(path: Path, content: bytes) -> None:
    """Write a draft to the disk, which then takes the place of the old file. Raises OSError."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


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


ROLES = ("system", "developer", "user", "assistant")
LAST_ROLE = "user"


@dataclass(frozen=True)
class TrainingRow:
    """One example: what the model is asked, the tools that it may call, and what the grader reads."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    item: dict[str, Any]
    """The whole row, as OpenAI's graders see it."""


class RowFile:
    """Reads single rows of a file that was checked."""

    def __init__(self, path: Path, limits: FineTuningLimits) -> None:
        """Raises BadRow for the first line that is no row, or for a file without rows."""
        self._path, self._limits = path, limits
        self._offsets = list(self._checked())
        if not self._offsets:
            raise BadRow("the file has no rows")

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> TrainingRow:
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            return parse_row(file.readline(), number + 1, self._limits)

    def _checked(self) -> Iterator[int]:
        """The place of each row in the file."""
        most = self._limits.row_bytes
        with self._path.open("rb") as file:
            number, offset, rows = 0, 0, 0
            while line := file.readline(most + 2):
                number += 1
                if len(line.rstrip(b"\r\n")) > most:
                    raise BadRow(f"line {number} is longer than {most} bytes")
                if line.strip():
                    rows += 1
                    if rows > self._limits.rows:
                        raise BadRow(f"the file has more than {self._limits.rows} rows")
                    parse_row(line, number, self._limits)
                    yield offset
                offset += len(line)


def parse_row(line: bytes, number: int, limits: FineTuningLimits) -> TrainingRow:
    """Raises BadRow."""
    try:
        row = read_json(line)
    except msgspec.DecodeError as error:
        raise BadRow(f"line {number} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow(f"line {number} is no JSON object")
    if len(row) > limits.row_fields:
        raise BadRow(f"line {number} has more than {limits.row_fields} fields")
    messages, tools = row.get("messages"), row.get("tools", [])
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"line {number}: messages must be a list with at least one message")
    if len(messages) > limits.messages:
        raise BadRow(f"line {number} has more than {limits.messages} messages")
    for place, message in enumerate(messages):
        if fault := _fault(message):
            raise BadRow(f"line {number}: messages[{place}]{fault}")
    if messages[-1]["role"] != LAST_ROLE:
        raise BadRow(
            f"line {number}: the last message must have the role {LAST_ROLE!r}: the model answers it"
        )
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"line {number}: tools must be a list of objects")
    return TrainingRow(messages, tools, row)


def _fault(message: object) -> str | None:
    """What is wrong with a message; None if nothing is."""
    if not isinstance(message, dict):
        return " is no object"
    if message.get("role") not in ROLES:
        return f".role must be one of {', '.join(ROLES)}"
    content = message.get("content")
    if isinstance(content, str):
        return None
    if not isinstance(content, list) or not content:
        return ".content must be a text, or a list of parts"
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return f".content[{place}] must be a part of the type 'text'"
    return None
