"""The state that a checkpoint stores beside the weights, and the ledger's line for each step."""

from collections.abc import Sequence

import msgspec

from rollout_queue.commands.log import BEGINNING
from rollout_queue.contract.policies.trained_step import TrainedStep
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.groups.evaluation import EvaluationState
from trainer_service.groups.guards import GuardState
from trainer_service.groups.task_rates import TaskRate
from trainer_service.groups.undone import RecoveryState
from trainer_service.groups.version_scores import ScoreState
from trainer_service.model.sharding.layout import Layout
from trainer_service.rows.rows import Row


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
