"""The state that a checkpoint stores beside the weights, and small files beside the checkpoints, each
replaced as a whole.

{directory}/VERSION          the highest version number that was ever given out
{directory}/HELD             why a guard holds the training, until an operator resumes it
{directory}/ATTEMPT          the groups that are computed now, and those that were when processes ended
{directory}/OUT_OF_MEMORY    there if a rank has ended because a pass did not fit into its memory
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.trainer_commands import BEGINNING
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.groups.evaluation import EvaluationState
from trainer_service.groups.group_rewards import ScoreState
from trainer_service.groups.guards import GuardState, RecoveryState
from trainer_service.groups.reward_guard import Alarm
from trainer_service.groups.task_rates import TaskRate
from trainer_service.model.checkpoint_layout import Layout
from trainer_service.rows.rows import Row
from trainer_service.storage.durable_files import sync_directory, write_atomically, written


class LedgerStep(msgspec.Struct, frozen=True):
    """What one optimizer step trained."""

    step: int
    version: int
    durable: bool
    turns: list[str]
    sessions: list[str]
    tokens: int

    @classmethod
    def of(cls, step: int, version: int, rows: Sequence[Row]) -> "LedgerStep":
        """`step` trained these rows and made `version`."""
        return cls(
            step=step,
            version=version,
            durable=True,
            turns=[turn_id for row in rows for turn_id in row.turn_ids],
            sessions=sorted({row.session_id for row in rows}),
            tokens=sum(row.trained_tokens for row in rows),
        )

    def from_base(self, base: int) -> TrainedStep:
        """The step as Redis keeps it. `base` is the version of the weights before it."""
        turns, sessions = len(self.turns), len(self.sessions)
        return TrainedStep(self.step, self.version, base, turns, sessions, self.tokens)


class RunState(msgspec.Struct, frozen=True):
    """Everything that a restart needs beside the weights."""

    step: int = 0
    version: int = 0
    owed: Acknowledgement = Acknowledgement([], {}, [])
    """Trained entries that are not acknowledged yet. A restart acknowledges them, and never trains them."""
    settled: list[str] = []
    """Sessions that have ended, the newest last."""
    gone: dict[str, int] = {}
    """Groups that were released without some of their members, and how many members each had; 0 if that is
    not known."""
    baselines: dict[str, float] = {}
    """The running mean reward of each agent, for the advantage `rae`."""
    kl_coefficient: float | None = None
    """The present coefficient of the KL penalty, if `kl.target` controls it."""
    task_rates: list[TaskRate] = []
    """How often the policy solves each task, for the curriculum."""
    evaluations: EvaluationState = EvaluationState()
    """The scores of versions in evaluation sessions, which are not trained."""
    scores: ScoreState = ScoreState()
    """The rewards of versions, by which the best one is chosen."""
    counted: list[str] = []
    """Groups that wait, and whose rewards are in the scores and in the guards' memory."""
    guards: GuardState = GuardState()
    recovery: RecoveryState = RecoveryState()
    command_position: str = BEGINNING
    """With `source: commands`, the place in their log of the last command that was carried out."""
    ledger_bytes: int = 0
    """How many bytes of the ledger belong to this checkpoint."""
    files: dict[str, int] = {}
    """The size in bytes of every file, by its path below the checkpoint."""
    layout: Layout | None = None
    """How the weights are cut into shards. Old checkpoints have None, which stands for the layout of the
    trainer that loads them."""


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
        other weights than the lost ones, so they must not get the same numbers. Raises DiskRefused."""
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
        """Raises DiskRefused."""
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
