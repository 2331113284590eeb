"""The rows of a training file: JSON objects, one a line, each with `messages` and whatever its grader reads.

{"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}      `answer` is {{item.answer}}
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fine_tuning.errors import BadRow
from fine_tuning.settings import FineTuningLimits
from rollout_queue.foreign_json import read_json

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
