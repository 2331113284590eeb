"""Whether a session that opens now would be trained in time: prevention, where dropping is waste.

line of rollouts ahead ÷ rollouts per step = versions until it is trained, beside those the engines lag
"""

import math
import time
from dataclasses import dataclass

from gateway.admission.limits import UNKNOWN_S, Trend, guess, limit_reached
from gateway.admission.pressure import TrainerBacklog
from gateway.errors import LimitReached


@dataclass(frozen=True)
class StalenessBudget:
    """The budget of versions, with what the trainer last said."""

    versions: int
    trainer: TrainerBacklog
    serving: int
    """The version that would sample the session."""

    @property
    def lag(self) -> int:
        return max(0, self.trainer.version - self.serving)

    @property
    def room(self) -> int:
        """How many rollouts may be ahead of a new one.

        The one behind k others is trained k // per_step steps from now: that, and the lag at its start, is
        its age then. Where the engines do not lag, this is AReaL's capacity (arXiv 2505.24298).
        """
        return max(0, math.floor((self.versions - self.lag + 1) * self.trainer.rollouts_per_step))

    @property
    def bound(self) -> int:
        """The room, counted in sessions without a verdict: those that the weights contain are not ahead."""
        return self.room + self.trainer.rollouts_owed

    @property
    def used_up(self) -> bool:
        """Whether what has ended and waits is enough already, whoever brought it."""
        return self.trainer.rollouts_waiting >= self.room

    def refusal(self, ahead: int, pace: Trend) -> LimitReached:
        """`ahead` rollouts are too many; `pace` is how the trainer's version grows."""
        silent_s = time.time() - self.trainer.last_seen
        message = (
            f"a session opened now would be trained too late for gateway.limits.staleness_versions "
            f"{self.versions}: {ahead} rollouts are ahead of it, the trainer takes "
            f"{self.trainer.rollouts_per_step:g} a step, and the engines serve version {self.serving} while "
            f"it is at {self.trainer.version}"
        )
        if silent_s > UNKNOWN_S:
            message += f" and was last heard of {silent_s:.0f} s ago"
        message += ". Sessions with train: false are let in"
        if self.lag > self.versions:  # for the push of newer weights, which no step brings nearer
            return limit_reached("staleness_budget", message, UNKNOWN_S)
        steps = max(1.0, (ahead - self.room + 1) / self.trainer.rollouts_per_step)
        return limit_reached("staleness_budget", message, guess(pace.seconds_to_move(steps)))
