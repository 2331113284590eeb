"""Guards: checks of the last steps' metrics and the last groups' rewards, which may hold the training."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import nan, sqrt
from statistics import fmean, median, variance

import msgspec

from trainer_service.settings import GuardSettings

MEDIAN_STEPS = 100
"""How many earlier steps the median of the gradient norm covers."""
FEWEST_STEPS = 20
"""With fewer earlier steps, the gradient norm raises no alarm."""
SMALLEST_MEDIAN = 1.0
"""A smaller median counts as this. When a policy has learned its task, its gradients are near zero, and one
larger gradient is no reason for an alarm."""
GROUPS_KEPT = 4096
"""The best mean reward is searched among this many of the last groups."""
SESSIONS_KEPT = 256
"""How many evaluation sessions of a version are compared."""
VERSIONS_KEPT = 16
NOISE = 5.0
"""A fall of the mean reward raises an alarm only if it is greater than this many standard errors."""

Values = Mapping[str, float]


@dataclass(frozen=True)
class Alarm:
    """A guard's reason to hold the training."""

    guard: str
    reason: str


class GuardState(msgspec.Struct, frozen=True):
    """What guards know, as a checkpoint stores it."""

    norms: list[float] = []
    """The norms of the last gradients, the newest last."""
    rewards: list[float] = []
    """The mean rewards of the last groups."""
    evaluated: dict[int, list[float]] = {}
    """The rewards of each version's first evaluation sessions, in the order in which they ended."""


class Guards:
    """Keeps the last steps and rewards. A guard that raises an alarm forgets them, so that the same steps or
    groups do not raise a second alarm."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self.resume(GuardState())

    def resume(self, state: GuardState) -> None:
        """Continue with what a checkpoint stored."""
        self._norms = deque(state.norms, MEDIAN_STEPS + 1)
        self._rewards = deque(state.rewards, GROUPS_KEPT)
        self._evaluated = {version: list(rewards) for version, rewards in state.evaluated.items()}

    @property
    def state(self) -> GuardState:
        evaluated = {version: list(rewards) for version, rewards in self._evaluated.items()}
        return GuardState(list(self._norms), list(self._rewards), evaluated)

    def check_step(self, values: Values) -> Alarm | None:
        """The first alarm that a step raises; None if it raises none."""
        self._norms.append(values["grad_norm"])
        if reason := grad_norm(list(self._norms), values, self._settings):
            self._norms.clear()
            return Alarm("max_grad_norm_ratio", reason)
        found = ((name, check(values, self._settings)) for name, check in _OF_STEPS.items())
        return next((Alarm(name, reason) for name, reason in found if reason), None)

    def check_rewards(
        self, rewards: Sequence[float], evaluations: Sequence[tuple[int, float]] = ()
    ) -> Alarm | None:
        """The alarm that new groups or evaluation sessions raise; None if they raise none. `rewards` has the
        mean reward of each group, the newest last, and `evaluations` each session's version and reward. The
        check does not wait for a step, because no step is made while all rewards are 0."""
        self._rewards += rewards
        reason = reward(list(self._rewards), self._settings) if rewards else None
        for version, value in evaluations:
            kept = self._evaluated.setdefault(version, [])
            kept += [value] if len(kept) < SESSIONS_KEPT else []
        if evaluations and reason is None:
            reason = evaluation(self._evaluated, self._settings)
            self._forget_versions()
        if reason is None:
            return None
        self.forget_rewards()
        return Alarm("reward_drop", reason)

    def forget_rewards(self) -> None:
        """Begin anew: the weights are others than those that earned these rewards."""
        self._rewards.clear()
        self._evaluated.clear()

    def _forget_versions(self) -> None:
        """Keep the newest versions, and the best of those with enough sessions."""
        newest = sorted(self._evaluated)[-VERSIONS_KEPT:]
        judged = [v for v, rewards in self._evaluated.items() if len(rewards) >= self._settings.reward_groups]
        best = sorted(judged, key=lambda version: fmean(self._evaluated[version]))[-1:]
        self._evaluated = {version: self._evaluated[version] for version in {*newest, *best}}


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


def abs_logp(values: Values, settings: GuardSettings) -> str | None:
    """Trainer and engine give the same tokens of the same weights different log-probabilities: one of the two
    computes them wrongly. What learning has moved since an older version sampled a token is no fault, so a
    step that has only such tokens is not judged."""
    limit = settings.max_abs_logp
    if limit is None or ("mismatch/abs_logp_current" not in values and "mismatch/abs_logp" in values):
        return None
    if (seen := values.get("mismatch/abs_logp_current", nan)) <= limit:
        return None
    return (
        f"mean |Δlogprob| between trainer and engine is {seen:.3g} in step {values['step']:g}, on tokens of "
        f"the trainer's own version, beyond {limit:g} (guards.max_abs_logp)"
    )


def kl(values: Values, settings: GuardSettings) -> str | None:
    """The log-probabilities of trainer and engine differ in the mean: most tokens differ in the same
    direction."""
    limit = settings.max_kl
    if limit is None or abs(seen := values.get("mismatch/kl", nan)) <= limit:
        return None
    return (
        f"the KL between engine and trainer is {seen:.3g} in step {values['step']:g}, beyond {limit:g} "
        "(guards.max_kl)"
    )


def reward(rewards: Sequence[float], settings: GuardSettings) -> str | None:
    """The mean reward of the last groups is far below the best mean of as many groups before them."""
    groups = settings.reward_groups
    if settings.reward_drop is None or len(rewards) < 2 * groups:
        return None
    sums = list(accumulate(rewards, initial=0.0))
    starts = range(len(rewards) - 2 * groups + 1)
    start = max(starts, key=lambda start: sums[start + groups] - sums[start])
    best, now = rewards[start : start + groups], rewards[-groups:]
    if not _has_fallen(best, now, settings.reward_drop):
        return None
    return (
        f"the mean reward of the last {groups} groups is {fmean(now):.3g}, and was {fmean(best):.3g} at best "
        "(guards.reward_drop)"
    )


def evaluation(evaluated: Mapping[int, Sequence[float]], settings: GuardSettings) -> str | None:
    """The newest version that has enough evaluation sessions has a far smaller mean reward than an earlier
    one.

    The sessions of one version are no steady stream: those that fail may all end first. So it is compared
    once it has as many sessions as the earlier one, or once a newer version has some."""
    known = {
        version: rewards for version, rewards in evaluated.items() if len(rewards) >= settings.reward_groups
    }
    if settings.reward_drop is None or not known:
        return None
    newest = max(known)
    now, ended = known[newest], newest < max(evaluated)
    for version in sorted(known.keys() - {newest}):
        before = known[version]
        if (ended or len(now) >= len(before)) and _has_fallen(before, now, settings.reward_drop):
            return (
                f"the mean reward of {len(now)} evaluation sessions of version {newest} is {fmean(now):.3g}, "
                f"and was {fmean(before):.3g} of version {version} (guards.reward_drop)"
            )
    return None


def _has_fallen(before: Sequence[float], now: Sequence[float], share: float) -> bool:
    """Whether the mean has fallen by more than this share of it, and more than noise explains."""
    fall = fmean(before) - fmean(now)
    noise = sqrt(variance(before) / len(before) + variance(now) / len(now))
    return fall > max(share * abs(fmean(before)), NOISE * noise)


_OF_STEPS: dict[str, Callable[[Values, GuardSettings], str | None]] = {
    "max_abs_logp": abs_logp,
    "max_kl": kl,
}
