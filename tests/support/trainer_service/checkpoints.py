"""A checkpoint that is durable when the call returns."""

from collections.abc import Sequence

from trainer_service.storage.checkpoint import Checkpoints, ShardedWeights
from trainer_service.storage.run_state import LedgerStep, RunState


def saved_checkpoint(
    checkpoints: Checkpoints, weights: ShardedWeights, state: RunState, steps: Sequence[LedgerStep] = ()
) -> str:
    """Write a checkpoint; returns its tag."""
    return checkpoints.write(checkpoints.copied(weights, state, steps))
