"""Writes one JSON line per step, and one per evaluation into a second file."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from trainer_service.sinks.sink import PointKind


class JsonLines:
    """Appends lines, which other processes may read at once. A step that is repeated after a restart has a
    second line. If a step, or a version in the second file, has several lines, the last one counts."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._paths: dict[PointKind, Path] = {
            "step": path,
            "evaluation": path.with_suffix(f".eval{path.suffix}"),
        }
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None: ...

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Numbers that are not finite are written as null. Raises OSError."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        _append(self._paths[kind], json.dumps(finite).encode() + b"\n")

    def close(self) -> None: ...


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
