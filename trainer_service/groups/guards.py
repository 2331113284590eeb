"""Guards: checks of the last steps' metrics and the last groups' rewards, which may hold the training; and
recoveries: which versions are undone because the training went back. What they sampled is not trained."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import nan
from statistics import median

import msgspec

from trainer_service.groups.reward_guard import (
    Alarm,
    EvaluationReward,
    GroupReward,
    RewardGuard,
    RewardSeries,
    RewardState,
)
from trainer_service.settings import GuardSettings


class Recovery(msgspec.Struct, frozen=True):
    """One time that the training was set back; RecoveryReport explains the fields."""

    version: int
    restored: int
    """The version whose weights were restored. The versions between both are undone."""
    step: int
    reason: str
    automatic: bool
    at: float
    """In seconds since 1970."""

    def undid(self, oldest: int, newest: int) -> bool:
        """Whether some of the versions from `oldest` to `newest` are undone."""
        return self.restored < newest and oldest < self.version


class RecoveryState(msgspec.Struct, frozen=True):
    """What a checkpoint stores of recoveries."""

    rate_scale: float = 1.0
    """The learning rate is this times the configured one."""
    done: list[Recovery] = []
    """The last recoveries, the newest last."""
    automatic: int = 0
    """How many recoveries guards have asked for."""


MEDIAN_STEPS = 100
"""How many earlier steps the median of the gradient norm covers."""
FEWEST_STEPS = 20
"""With fewer earlier steps, the gradient norm raises no alarm."""
SMALLEST_MEDIAN = 1.0
"""A smaller median counts as this. When a policy has learned its task, its gradients are near zero, and one
larger gradient is no reason for an alarm."""

Values = Mapping[str, float]


class GuardState(msgspec.Struct, frozen=True):
    """What guards know, as a checkpoint stores it."""

    norms: list[float] = []
    """The norms of the last gradients, the newest last."""
    rewards: list[float] = []
    """Of a checkpoint that does not tell tasks apart: the mean rewards of the last groups."""
    evaluated: dict[int, list[float]] = {}
    """The same for the evaluation sessions of each version."""
    by_task: RewardState = RewardState()


class Guards:
    """Keeps the last steps and rewards. A guard that raises an alarm forgets them, so that the same steps or
    groups do not raise a second alarm."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self.resume(GuardState())

    def resume(self, state: GuardState) -> None:
        self._norms = deque(state.norms, MEDIAN_STEPS + 1)
        self._rewards = RewardGuard(self._settings, _without_tasks(state, self._settings.reward_groups))

    @property
    def state(self) -> GuardState:
        return GuardState(list(self._norms), by_task=self._rewards.state)

    def check_step(self, values: Values) -> Alarm | None:
        """The first alarm that a step raises; None if it raises none."""
        self._norms.append(values["grad_norm"])
        if reason := grad_norm(list(self._norms), values, self._settings):
            self._norms.clear()
            return Alarm("max_grad_norm_ratio", reason)
        return mismatch(values, self._settings)

    def check_rewards(
        self, groups: Sequence[GroupReward], evaluations: Sequence[EvaluationReward] = ()
    ) -> Alarm | None:
        """The first alarm that new groups or evaluation sessions raise, the newest last; None if they raise
        none. The check does not wait for a step, because no step is made while all rewards are 0."""
        alarms = [*map(self._rewards.add, groups), self._rewards.add_evaluations(evaluations)]
        return next(filter(None, alarms), None)

    def forget_rewards(self) -> None:
        """Begin anew: the weights are others than those that earned these rewards."""
        self._rewards = RewardGuard(self._settings, RewardState())


def _without_tasks(state: GuardState, groups: int) -> RewardState:
    """What is known of rewards. What a checkpoint knows without their tasks counts for sessions without a
    task."""
    if not state.rewards and not state.evaluated:
        return state.by_task
    series = RewardSeries()
    for reward in state.rewards:
        series.add(reward, groups)
    known: dict[int, list[tuple[str | None, float]]] = {
        version: [(None, reward) for reward in rewards] for version, rewards in state.evaluated.items()
    }
    return RewardState(tasks={"": series}, evaluated={"": known})


def grad_norm(norms: Sequence[float], values: Values, settings: GuardSettings) -> str | None:
    """The gradient is much larger than usual. Clipping limits the size of the step, but a wrong direction
    remains."""
    before = norms[-1 - MEDIAN_STEPS : -1]
    if settings.max_grad_norm_ratio is None or len(before) < FEWEST_STEPS:
        return None
    norm, usual = norms[-1], max(SMALLEST_MEDIAN, median(before))
    if norm <= settings.max_grad_norm_ratio * usual:
        return None
    return (
        f"the gradient of step {values['step']:g} is {norm:.3g}, more than "
        f"{settings.max_grad_norm_ratio:g} times the usual {usual:.3g} (guards.max_grad_norm_ratio)"
    )


_MISMATCHES = (
    ("abs_logp", "mean |Δlogprob| between trainer and engine"),
    ("kl", "the KL between engine and trainer"),
)
"""What guards bound, each by the setting `max_` with its name: the two computed the same tokens of the same
weights. `kl` is far from 0 if most tokens differ in the same direction."""


def mismatch(values: Values, settings: GuardSettings) -> Alarm | None:
    """Trainer and engine give the same tokens of the same weights different log-probabilities: one of the two
    computes them wrongly.

    Judged on the tokens that the trainer's own version sampled. What learning has moved since an older
    version sampled a token is no fault, so a step that has only such tokens is not judged. Not a number if no
    token had a finite log-probability.
    """
    for name, what in _MISMATCHES:
        guard, metric = f"max_{name}", f"mismatch/{name}"
        limit = getattr(settings, guard)
        if limit is None or (metric in values and f"{metric}_current" not in values):
            continue
        seen = values.get(f"{metric}_current", nan)
        if not abs(seen) <= limit:
            reason = (
                f"{what} is {seen:.3g} in step {values['step']:g}, on tokens of the trainer's own version, "
                f"beyond {limit:g} (guards.{guard})"
            )
            return Alarm(guard, reason)
    return None
