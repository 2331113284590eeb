"""When training should hold, and why: looked for in the metrics of the last steps, and nowhere else."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean, median, variance

from pydantic import BaseModel, ConfigDict, Field

STEPS_KEPT = 1000
"""How far back the best mean reward is remembered."""
MEDIAN_STEPS = 100
"""Steps whose gradients make up the median."""
SMALLEST_MEDIAN = 1.0
"""A policy that has learned its task has gradients near zero, and one surprise is no alarm."""
NOISE = 5.0
"""A fall of the reward is none before it is so many times its standard error."""

Values = Mapping[str, float]
History = Sequence[Values]
"""Metrics of steps, the newest last."""


class GuardSettings(BaseModel):
    """Section `trainer.guards`. What is null is not guarded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_grad_norm_ratio: float | None = Field(100.0, gt=1)
    """`grad_norm`, before it is clipped, over its median of the last 100 steps; over 1 where that is less."""
    max_abs_logp: float | None = Field(1.0, gt=0)
    """`mismatch/abs_logp`, nats per token: mean |difference| of trainer and engine, staleness included."""
    max_kl: float | None = Field(1.0, gt=0)
    """`mismatch/kl`, nats per token, either way."""
    reward_drop: float | None = Field(0.5, gt=0)
    """How far the mean `reward_mean` of the last `reward_steps` steps may fall from the best that there was,
    as a share of that best's size. A fall that noise explains does not count."""
    reward_steps: int = Field(20, ge=2)
    """Also the fewest steps before the reward, or the gradient's median, means anything."""


@dataclass(frozen=True)
class Alarm:
    """Why training should hold."""

    guard: str
    reason: str


class Guards:
    """Remembers steps, and from where on each guard looks at them."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._seen: dict[str, deque[Values]] = {name: deque(maxlen=STEPS_KEPT) for name in _GUARDS}

    def check(self, values: Values) -> Alarm | None:
        """The first guard that a step sets off. It forgets its evidence and begins anew: on the same steps it
        does not speak twice."""
        for seen in self._seen.values():
            seen.append(values)
        alarm = next(self._alarms(), None)
        if alarm is not None:
            self._seen[alarm.guard].clear()
        return alarm

    def _alarms(self) -> Iterator[Alarm]:
        for name, look in _GUARDS.items():
            if reason := look(list(self._seen[name]), self._settings):
                yield Alarm(name, reason)


def grad_norm(history: History, settings: GuardSettings) -> str | None:
    """A step far beyond the others: what clipping keeps small is spoilt all the same."""
    before = [values["grad_norm"] for values in history[-1 - MEDIAN_STEPS : -1]]
    if settings.max_grad_norm_ratio is None or len(before) < settings.reward_steps:
        return None
    norm, usual = history[-1]["grad_norm"], max(SMALLEST_MEDIAN, median(before))
    if norm <= settings.max_grad_norm_ratio * usual:
        return None
    return (
        f"the gradient of step {history[-1]['step']:g} is {norm:.3g}, more than "
        f"{settings.max_grad_norm_ratio:g} times what is usual, {usual:.3g} (guards.max_grad_norm_ratio)"
    )


def abs_logp(history: History, settings: GuardSettings) -> str | None:
    """Trainer and engine disagree on what the same tokens were worth: stale data, or a broken pass."""
    limit = settings.max_abs_logp
    if limit is None or (seen := history[-1].get("mismatch/abs_logp", nan)) <= limit:
        return None
    return (
        f"mean |Δlogprob| between trainer and engine is {seen:.3g} in step {history[-1]['step']:g}, beyond "
        f"{limit:g} (guards.max_abs_logp)"
    )


def kl(history: History, settings: GuardSettings) -> str | None:
    """The same, signed: what the engine sampled has become unlikely."""
    limit = settings.max_kl
    if limit is None or abs(seen := history[-1].get("mismatch/kl", nan)) <= limit:
        return None
    return (
        f"the KL between engine and trainer is {seen:.3g} in step {history[-1]['step']:g}, beyond {limit:g} "
        "(guards.max_kl)"
    )


def reward(history: History, settings: GuardSettings) -> str | None:
    """The mean of the last steps against the best mean of as many steps that there was."""
    steps = settings.reward_steps
    rewards = [values["reward_mean"] for values in history]
    if settings.reward_drop is None or len(rewards) < 2 * steps:
        return None
    now = rewards[-steps:]
    best = max((rewards[end - steps : end] for end in range(steps, len(rewards) - steps + 1)), key=fmean)
    fall = fmean(best) - fmean(now)
    noise = ((variance(best) + variance(now)) / steps) ** 0.5
    if fall <= settings.reward_drop * abs(fmean(best)) or fall <= NOISE * noise:
        return None
    return (
        f"the mean reward of the last {steps} steps is {fmean(now):.3g}, and was {fmean(best):.3g} at best "
        "(guards.reward_drop)"
    )


_GUARDS: dict[str, Callable[[History, GuardSettings], str | None]] = {
    "max_grad_norm_ratio": grad_norm,
    "max_abs_logp": abs_logp,
    "max_kl": kl,
    "reward_drop": reward,
}
