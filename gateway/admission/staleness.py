"""Decides whether a session that opens now would be trained in time: the trainer drops stale rollouts.

staleness, in versions = rollouts ahead of it ÷ rollouts per step + versions by which the engines lag
"""

import math
from dataclasses import dataclass

from gateway.admission.backpressure import TrainerBacklog
from gateway.admission.limits import DEFAULT_RETRY_S, StepTrend, limit_reached, retry_after_s
from gateway.errors import LimitReached
from rollout_queue import clock


@dataclass(frozen=True)
class StalenessBudget:
    """The greatest permitted staleness, `versions`, and what a session's staleness depends on."""

    versions: int
    trainer: TrainerBacklog
    serving: int
    """The version that would sample the session now."""

    @property
    def lag(self) -> int:
        """Versions by which the engines are behind the trainer."""
        return max(0, self.trainer.version - self.serving)

    @property
    def room(self) -> int:
        """How many rollouts may be ahead of a new one.

        A rollout behind k others is trained k // rollouts_per_step steps from now. Its staleness is then that
        number plus the lag at its start. Without lag, the room is AReaL's capacity (arXiv 2505.24298).
        """
        return max(0, math.floor((self.versions - self.lag + 1) * self.trainer.rollouts_per_step))

    @property
    def bound(self) -> int:
        """The room, for a count of sessions without a verdict: that count includes the `rollouts_owed`."""
        return self.room + self.trainer.rollouts_owed

    @property
    def used_up(self) -> bool:
        """Whether the rollouts that wait for training fill the room already."""
        return self.trainer.rollouts_waiting >= self.room

    def refusal(self, ahead: int, pace: StepTrend) -> LimitReached:
        """The error for too many rollouts `ahead`; `pace` says how long a step takes."""
        silent_s = clock.now() - self.trainer.last_seen
        message = (
            f"a session opened now would be trained too late for gateway.limits.staleness_versions "
            f"{self.versions}: {ahead} rollouts are ahead of it, the trainer takes "
            f"{self.trainer.rollouts_per_step:g} a step, and the engines serve version {self.serving} while "
            f"the trainer is at {self.trainer.version}"
        )
        if silent_s > DEFAULT_RETRY_S:
            message += f". The trainer last reported {silent_s:.0f} s ago"
        message += ". Sessions with train: false are admitted"
        if self.lag > self.versions:  # no step helps: the engines need newer weights first
            return limit_reached("staleness_budget", message, DEFAULT_RETRY_S)
        steps = max(1.0, (ahead - self.room + 1) / self.trainer.rollouts_per_step)
        return limit_reached("staleness_budget", message, retry_after_s(pace.seconds_to_move(steps)))
