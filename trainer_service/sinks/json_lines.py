"""One JSON line per step, and beside them one per evaluation."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from trainer_service.sinks.sink import What


class JsonLines:
    """Appends, and is read while it does. After a restart the steps that are made again are lines again: of
    several lines with one step (one version, where evaluations are read), the last counts."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._paths: dict[What, Path] = {"step": path, "evaluation": path.with_suffix(f".eval{path.suffix}")}
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None: ...

    def write(self, what: What, values: Mapping[str, float]) -> None:
        """JSON has no NaN: what is not finite is null. Raises OSError."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        _append(self._paths[what], json.dumps(finite).encode() + b"\n")

    def close(self) -> None: ...


def _append(path: Path, line: bytes) -> None:
    """The whole line or nothing of it: half a line would spoil the next one too. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise
