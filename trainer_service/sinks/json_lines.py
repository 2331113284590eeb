"""Writes one JSON line per step, and one per evaluation into a second file."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer_service.sinks.sink import PointKind

PART_BYTES = 16 * 2**20
"""How much of the end of a file is read. Steps that no checkpoint has are at its end."""
AGAIN_BYTES = 2**18
"""How much a sink that has lost points gets again. W&B holds 32 KiB in memory."""
EVALUATIONS = ".eval"
"""What the name of the second file has before its suffix."""


class JsonLines:
    """Appends lines, which other processes may read at once. A step that is repeated after a restart has a
    second line. If a step, or a version in the second file, has several lines, the last one counts."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._paths = _paths(path)
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None: ...

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Numbers that are not finite are written as null. Raises OSError."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        _append(self._paths[kind], json.dumps(finite).encode() + b"\n")

    def close(self) -> None: ...


def last_points(path: Path, step: int) -> Iterator[tuple[PointKind, Mapping[str, float]]]:
    """The last points up to `step` that `JsonLines` has written in this file and beside it, in their order:
    about AGAIN_BYTES of each kind. Numbers that were not finite are left out. Raises OSError."""
    for kind, file in _paths(path).items():
        lines, size = list[dict[str, float]](), 0
        for line in reversed(_last_lines(file)):
            try:
                point = json.loads(line)
            except ValueError:  # the first line of the part, or half a line, which a full disk has left
                continue
            if point["step"] <= step:
                lines.append({name: value for name, value in point.items() if value is not None})
                size += len(line)
            if size > AGAIN_BYTES:
                break
        yield from ((kind, point) for point in reversed(lines))


def _paths(path: Path) -> Mapping[PointKind, Path]:
    return {"step": path, "evaluation": path.with_suffix(f"{EVALUATIONS}{path.suffix}")}


def _last_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - PART_BYTES))
        return file.read(PART_BYTES).splitlines()


def _append(path: Path, line: bytes) -> None:
    """Write the whole line or nothing: after half a line, the next one is unreadable. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise
