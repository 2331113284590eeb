"""When a checkpoint is needed, and writing it: what was trained since the last one."""

from trainer_service.groups.evaluation import EvaluationState
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.storage.checkpoint import Checkpoints, ShardedWeights
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.run_state import LedgerStep, RunState


class CheckpointCycle:
    """Collects the ledger's lines of the steps that no checkpoint contains yet."""

    def __init__(
        self, checkpoints: Checkpoints, weights: ShardedWeights, heartbeat: Heartbeat, disk: DiskRetry
    ) -> None:
        self._checkpoints, self._weights = checkpoints, weights
        self._heartbeat, self._disk = heartbeat, disk
        self._new_steps: list[LedgerStep] = []
        self._saved_evaluations = EvaluationState()

    def restore(self) -> RunState | None:
        """Load the weights of the last checkpoint; None where there is none. Raises CheckpointBroken."""
        state = self._checkpoints.restore(self._weights)
        if state is not None:
            self._saved_evaluations = state.evaluations
        return state

    def add(self, step: LedgerStep) -> None:
        """The weights contain this step now."""
        self._new_steps.append(step)

    @property
    def durable(self) -> bool:
        """Whether the last checkpoint contains every step."""
        return not self._new_steps

    def is_outdated(self, evaluations: EvaluationState) -> bool:
        """Whether there are steps or evaluations that the last checkpoint does not contain."""
        return not self.durable or evaluations != self._saved_evaluations

    def save(self, state: RunState) -> None:
        """Write a checkpoint as soon as the disk takes it. Raises Stopped when told to stop, and LeaseLost
        when another trainer has taken over."""

        def save() -> None:
            self._heartbeat.confirm()
            self._checkpoints.save(self._weights, state, self._new_steps)

        self._disk.until_written("a checkpoint", save)
        self._new_steps = []
        self._saved_evaluations = state.evaluations
