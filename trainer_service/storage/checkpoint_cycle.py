"""Decides whether a checkpoint is needed, and writes it."""

from trainer_service.groups.evaluation import EvaluationState
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.storage.checkpoint import Checkpoints, ShardedWeights, Wanted
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.run_state import LedgerStep, RunState


class CheckpointCycle:
    """Collects the steps that no checkpoint contains yet, as lines of the ledger."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        weights: ShardedWeights,
        heartbeat: Heartbeat,
        disk: DiskRetry,
        wanted: Wanted,
    ) -> None:
        """The checkpoints of the versions that are `wanted` stay."""
        self._checkpoints, self._weights = checkpoints, weights
        self._heartbeat, self._disk = heartbeat, disk
        self._wanted = wanted
        self._new_steps: list[LedgerStep] = []
        self._saved_evaluations = EvaluationState()

    def restore(self) -> RunState | None:
        """Load the last checkpoint; None if there is none. Raises CheckpointBroken."""
        state = self._checkpoints.restore(self._weights)
        if state is not None:
            self._saved_evaluations = state.evaluations
        return state

    def versions(self) -> set[int]:
        """The versions whose weights and optimizer can be restored."""
        return set(self._checkpoints.versions())

    def load(self, version: int, rate_scale: float) -> None:
        """Go back to the weights, optimizer and schedule of a version. Raises CheckpointBroken."""
        self._checkpoints.load(self._weights, version, rate_scale)

    def add(self, step: LedgerStep) -> None:
        """Note that the weights contain this step now."""
        self._new_steps.append(step)

    @property
    def durable(self) -> bool:
        """Whether the last checkpoint contains every step."""
        return not self._new_steps

    def is_outdated(self, evaluations: EvaluationState) -> bool:
        """Whether there are steps or evaluations that the last checkpoint does not contain."""
        return not self.durable or evaluations != self._saved_evaluations

    def save(self, state: RunState) -> None:
        """Write a checkpoint. Waits while the disk refuses it. Raises Stopped when told to stop meanwhile,
        and LeaseLost if another trainer has claimed the lease."""

        def save() -> None:
            self._heartbeat.confirm()
            self._checkpoints.save(self._weights, state, self._new_steps, self._wanted)

        self._disk.until_written("a checkpoint", save)
        self._new_steps = []
        self._saved_evaluations = state.evaluations
