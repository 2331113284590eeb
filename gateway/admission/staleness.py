"""Decides whether a session that opens now would be trained in time, since a late rollout would be dropped.

rollouts ahead of it ÷ rollouts per step = versions until it is trained, plus those by which the engines lag
"""

import math
import time
from dataclasses import dataclass

from gateway.admission.backpressure import TrainerBacklog
from gateway.admission.limits import DEFAULT_RETRY_S, Trend, limit_reached, retry_after_s
from gateway.errors import LimitReached


@dataclass(frozen=True)
class StalenessBudget:
    """The budget of versions, with the trainer's last report."""

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

        A rollout behind k others is trained k // per_step steps from now. Its age is then this number plus
        the lag at its start. Without lag, this is AReaL's capacity (arXiv 2505.24298).
        """
        return max(0, math.floor((self.versions - self.lag + 1) * self.trainer.rollouts_per_step))

    @property
    def bound(self) -> int:
        """The room in sessions without a verdict, of which those that the weights contain are not ahead."""
        return self.room + self.trainer.rollouts_owed

    @property
    def used_up(self) -> bool:
        """Whether the rollouts that have ended and wait already fill the room."""
        return self.trainer.rollouts_waiting >= self.room

    def refusal(self, ahead: int, pace: Trend) -> LimitReached:
        """The error for too many rollouts `ahead`; `pace` is the trend of the trainer's version."""
        silent_s = time.time() - self.trainer.last_seen
        message = (
            f"a session opened now would be trained too late for gateway.limits.staleness_versions "
            f"{self.versions}: {ahead} rollouts are ahead of it, the trainer takes "
            f"{self.trainer.rollouts_per_step:g} a step, and the engines serve version {self.serving} while "
            f"it is at {self.trainer.version}"
        )
        if silent_s > DEFAULT_RETRY_S:
            message += f" and was last heard of {silent_s:.0f} s ago"
        message += ". Sessions with train: false are let in"
        if self.lag > self.versions:  # waits for a push of newer weights, not for steps
            return limit_reached("staleness_budget", message, DEFAULT_RETRY_S)
        steps = max(1.0, (ahead - self.room + 1) / self.trainer.rollouts_per_step)
        return limit_reached("staleness_budget", message, retry_after_s(pace.seconds_to_move(steps)))
