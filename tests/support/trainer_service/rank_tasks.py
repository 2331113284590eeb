"""What two ranks are given to learn, and what they tell of it, in files."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.serving import free_port
from trainer_service.rows.rows import Row
from trainer_service.settings import TrainerSettings

Steps = Sequence[Sequence[Row]]
OVER = "over"
"""This file in place of the next task: there is none."""


@dataclass(frozen=True)
class Task:
    """What is to be learned, and where."""

    run: Path
    """Holds `checkpoints/`, and in the end `weights.safetensors`. Tasks may go on with the run of others."""
    settings: TrainerSettings
    steps: Steps
    probes: Steps = ()
    in_parts: bool = False
    port: int = field(default_factory=free_port)
    """Where the ranks meet."""


@dataclass(frozen=True)
class Told:
    """What rank 0 says of a task."""

    metrics: list[dict[str, float]]
    """Of each step that it made."""
    sound: list[bool]
    """Of each probe."""
    finite: bool
    """Whether every weight is a number in the end."""


def place_of(folder: Path, number: int) -> Path:
    """Where a task is put, and what is told of it."""
    return folder / f"task-{number}"


def put(value: object, path: Path) -> None:
    """Whoever sees the file sees all of it."""
    half = path.with_suffix(".half")
    half.write_bytes(pickle.dumps(value))
    half.rename(path)
