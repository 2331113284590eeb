"""The files by which a test gives two ranks a task, and rank 0 reports on it."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_queue.trainer_commands import Command
from tests.support.serving import free_port
from trainer_service.rows.rows import Row
from trainer_service.settings import TrainerSettings
from trainer_service.step.step_parts import TurnRecord

Steps = Sequence[Sequence[Row]]
OVER = "over"
"""If this file exists, no further task follows."""
SLOW, FULL, WRITING = "slow", "full", "writing"
"""Files in a task's directory. As long as they exist, rank 1's disk makes no progress, or is full. Rank 1
makes `writing` when it begins to write a version."""

LOG = "log.pickle"
"""The log of a task with a script, and the weights of each of its models, in the task's directory."""
SYNCED = "synced"
"""A file in a task's directory with the names of the files that rank 1 has synced."""


@dataclass(frozen=True)
class Task:
    """The steps to train, and the directory of the run."""

    run: Path
    """Holds `checkpoints/`, and at the end `weights.safetensors`. A task may continue another task's run."""
    settings: TrainerSettings
    steps: Steps
    probes: Steps = ()
    in_parts: bool = False
    publishes: Sequence[int] = ()
    """The steps after which a version is published, in `policies`; 0 is before the first step."""
    shares: bool = True
    """Whether ranks share the disk of `policies`. Otherwise each has a working directory of its own."""
    may_fail: bool = False
    """Whether the test ends ranks before the task is done."""
    script: Sequence[tuple[str, Command]] = ()
    """Commands and their models, in place of steps. The log is kept in the run's directory."""
    port: int = field(default_factory=free_port)
    """The port of the process group."""

    @property
    def policies(self) -> Path:
        """The directory of published versions."""
        return self.run / "policies" if self.shares else Path("/proc/self/cwd/policies")

    def directory_of(self, rank: int) -> Path:
        """The working directory of a rank that shares no disk."""
        return self.run / f"host-{rank}"


@dataclass(frozen=True)
class Program:
    """A process as `python -m trainer_service` makes one."""

    environment: Mapping[str, str]
    log: Path
    """What it writes to its standard output and error output."""
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Told:
    """The report of rank 0 on a task."""

    metrics: list[dict[str, float]]
    """The metrics of each step."""
    sound: list[bool]
    """Whether the gradient of each probe is finite."""
    finite: bool
    """Whether every weight is finite at the end."""
    refusals: int = 0
    """How many times a disk refused a version."""
    records: Sequence[Sequence[TurnRecord]] = ()
    """What each step has used of each turn's tokens."""
    held: Sequence[int] = ()
    """For each rank, the most bytes of weights that a snapshot had in memory."""


def place_of(folder: Path, number: int) -> Path:
    """The directory of a task and of the report on it."""
    return folder / f"task-{number}"


def held_path(place: Path, rank: int) -> Path:
    """The last file of a rank for a task: its number in `Told.held`."""
    return place / f"held-{rank}.pickle"


def ranks_path(place: Path) -> Path:
    """The process ids of the ranks of a task."""
    return place / "ranks.pickle"


def ended_path(place: Path) -> Path:
    """The exit statuses of the ranks of a task, once all have ended."""
    return place / "ended.pickle"


def put(value: object, path: Path) -> None:
    """Write the file atomically, so that a reader never sees a part of it."""
    half = path.with_suffix(".half")
    half.write_bytes(pickle.dumps(value))
    half.rename(path)
