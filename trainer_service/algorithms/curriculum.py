"""The settings of the curriculum, and the weight that a task's pass rate gives to it."""

from pydantic import BaseModel, ConfigDict, Field


class CurriculumSettings(BaseModel):
    """How pass rates are measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pass_reward: float = 0.5
    """A rollout passes if its reward is at least this."""
    memory: int = Field(32, ge=1)
    """Over about how many of its last rollouts the pass rate of a task is a mean."""


def smoothed(passed: float, rollouts: float) -> float:
    """The pass rate by Laplace's rule of succession: 1/2 before the first rollout, and never 0 or 1."""
    return (passed + 1) / (rollouts + 2)


def learnability(pass_rate: float) -> float:
    """The variance of passing, relative to its largest value: 1 at a rate of 1/2, 0 at rates of 0 and 1
    (2502.12272)."""
    return 4 * pass_rate * (1 - pass_rate)
