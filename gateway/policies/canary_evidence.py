"""What the calls of a canary have shown, by arm and group, and what the gates decide: arithmetic only.

Groups are the unit of every interval, because the sessions of a group have one task. A mean over groups has
the standard error of a ratio of sums (Cochran, Sampling Techniques, 3rd ed., section 2.11):

    r = Σ x_g / Σ n_g      se² = G / (G - 1) · Σ (x_g - r n_g)² / (Σ n_g)²
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from rollout_queue.contract.serving_plan import (
    Arm,
    CanaryCall,
    CanaryGates,
    CanaryRecord,
    CanaryReport,
    CanaryScore,
    CanaryState,
    GateName,
    GateReading,
    ReadingState,
)

LEAST_GROUPS = 3
"""With fewer groups, a gate decides nothing."""
MOST_GROUPS = 10_000
"""How many groups of an arm are looked at."""
NORMAL = NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A mean over groups."""

    mean: float
    error: float
    """Its standard error."""
    groups: int

    def less(self, other: "Estimate") -> "Estimate":
        """The difference of two independent means."""
        error, groups = math.hypot(self.error, other.error), min(self.groups, other.groups)
        return Estimate(self.mean - other.mean, error, groups)

    def log(self) -> "Estimate":
        """The logarithm of a positive mean, by the delta method."""
        return Estimate(math.log(self.mean), self.error / self.mean, self.groups)


@dataclass
class GroupEvidence:
    """The calls of one group in one arm."""

    calls: int = 0
    failed: int = 0
    tokens: int = 0
    kl: float = 0.0
    kl_tokens: int = 0
    size: int | None = None
    sessions: set[str] = field(default_factory=set)
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By session that has ended."""

    @property
    def ended(self) -> bool:
        """Whether every session has ended that it has, or will have."""
        return len(self.rewards) == len(self.sessions) >= (self.size or 1)

    @property
    def reward(self) -> float | None:
        """The mean over the sessions that have a reward."""
        found = [reward for reward in self.rewards.values() if reward is not None]
        return sum(found) / len(found) if found else None


@dataclass
class CanaryEvidence:
    """The groups of both arms."""

    arms: dict[Arm, dict[str, GroupEvidence]] = field(default_factory=lambda: {"canary": {}, "baseline": {}})
    waiting: dict[str, tuple[Arm, str]] = field(default_factory=dict)
    """The sessions that have not ended: their arm and group, the one that was looked at longest ago first."""

    def add(self, record: CanaryRecord) -> None:
        match record:
            case CanaryScore():
                if (group := self.arms["canary"].get(record.group)) is not None:
                    group.kl += record.kl
                    group.kl_tokens += record.tokens
            case CanaryCall():
                self._add_call(record)

    def _add_call(self, call: CanaryCall) -> None:
        groups = self.arms[call.arm]
        if call.group not in groups and len(groups) >= MOST_GROUPS:
            return
        group = groups.setdefault(call.group, GroupEvidence())
        group.calls += 1
        group.failed += not call.ok
        group.tokens += call.tokens
        if call.session not in group.sessions:
            group.sessions.add(call.session)
            self.waiting[call.session] = (call.arm, call.group)

    def session_ended(self, session: str, reward: float | None, size: int | None) -> None:
        """A session has ended; its group has `size` sessions, if that is known."""
        arm, name = self.waiting.pop(session)
        group = self.arms[arm][name]
        group.rewards[session], group.size = reward, size

    def ended_groups(self, arm: Arm) -> list[GroupEvidence]:
        return [group for group in self.arms[arm].values() if group.ended]

    def report(self, gates: CanaryGates) -> CanaryReport:
        return CanaryReport(
            groups=len(self.ended_groups("canary")),
            baseline_groups=len(self.ended_groups("baseline")),
            readings=tuple(self._readings(gates)),
        )

    def _readings(self, gates: CanaryGates) -> Iterable[GateReading]:
        if gates.max_kl is not None:
            yield self._kl(gates.max_kl)
        if gates.max_reward_drop is not None:
            yield self._reward(gates.max_reward_drop)
        if gates.max_error_increase is not None:
            yield self._errors(gates.max_error_increase)
        if gates.max_length_change is not None:
            yield self._length(gates.max_length_change)

    def _kl(self, bound: float) -> GateReading:
        groups = self.arms["canary"].values()
        found = estimate((group.kl, group.kl_tokens) for group in groups)
        return _upper("kl", found.mean, *_interval(found), bound, found.groups)

    def _reward(self, bound: float) -> GateReading:
        tried, served = (
            estimate((group.reward, 1) for group in self.ended_groups(arm) if group.reward is not None)
            for arm in ARMS
        )
        drop = served.less(tried)
        low, high = _interval(drop)
        reading = _upper("reward", drop.mean, low, high, bound, drop.groups)
        # The bound is on a drop; the numbers are the change, which is easier to read.
        return _shown(reading, -drop.mean, -high, -low)

    def _errors(self, bound: float) -> GateReading:
        tried, served = (
            estimate((group.failed, group.calls) for group in self.arms[arm].values()) for arm in ARMS
        )
        increase = tried.less(served)
        return _upper("errors", increase.mean, *_interval(increase), bound, increase.groups)

    def _length(self, bound: float) -> GateReading:
        tried, served = (
            estimate((group.tokens, group.calls - group.failed) for group in self.arms[arm].values())
            for arm in ARMS
        )
        groups = min(tried.groups, served.groups)
        if not (groups and tried.mean > 0 and served.mean > 0):
            return _upper("length", 0.0, 0.0, 0.0, bound, 0)
        change = tried.log().less(served.log())
        low, high = _interval(change)
        # Longer and shorter count alike: the interval of |change|.
        least = max(0.0, low, -high)
        reading = _upper("length", abs(change.mean), least, max(-low, high), math.log1p(bound), groups)
        if math.isfinite(low):
            low, high = math.exp(low), math.exp(high)
        return _shown(reading, math.exp(change.mean), low, high, bound)


ARMS: tuple[Arm, Arm] = ("canary", "baseline")


def estimate(parts: Iterable[tuple[float, int]]) -> Estimate:
    """The ratio of the sums of these parts (x_g, n_g), one of each group. Parts without n are left out."""
    known = [(x, n) for x, n in parts if n > 0]
    if not known:
        return Estimate(0.0, 0.0, 0)
    whole, groups = sum(n for _, n in known), len(known)
    mean = sum(x for x, _ in known) / whole
    if groups == 1:
        return Estimate(mean, math.inf, 1)
    squares = sum((x - mean * n) ** 2 for x, n in known)
    return Estimate(mean, math.sqrt(groups / (groups - 1) * squares) / whole, groups)


def student(degrees: int) -> float:
    """The 0.975 quantile of Student's t (Abramowitz & Stegun, 26.7.5): 4.17 instead of 4.30 for 2 degrees,
    and nearer for more."""
    z, n = NORMAL, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _interval(found: Estimate) -> tuple[float, float]:
    """The interval that has the true mean 19 times of 20."""
    if found.groups < LEAST_GROUPS:
        return -math.inf, math.inf
    half = student(found.groups - 1) * found.error
    return found.mean - half, found.mean + half


def _upper(name: GateName, value: float, low: float, high: float, bound: float, groups: int) -> GateReading:
    """A gate on a value that must not be above its bound. It breaks only if the whole interval is above."""
    state: ReadingState
    if not groups:
        return GateReading(gate=name, state="missing", bound=bound)
    if groups < LEAST_GROUPS:
        state = "undecided"
    elif low > bound:
        state = "broken"
    else:
        state = "holds" if value <= bound else "undecided"
    return _shown(GateReading(gate=name, state=state, bound=bound, count=groups), value, low, high)


def _shown(
    reading: GateReading, value: float, low: float, high: float, bound: float | None = None
) -> GateReading:
    """The reading with these numbers; those that are not finite are left out."""
    if reading.state == "missing":
        return reading
    known = [number + 0.0 if math.isfinite(number) else None for number in (value, low, high)]  # no -0.0
    return GateReading(
        gate=reading.gate,
        state=reading.state,
        bound=reading.bound if bound is None else bound,
        value=known[0],
        low=known[1],
        high=known[2],
        count=reading.count,
    )


def outcome(report: CanaryReport, gates: CanaryGates, open_s: float) -> tuple[CanaryState, str] | None:
    """How the canary ends now, and why; None if it goes on. It is promoted if all gates hold, so
    never while a number is missing."""
    broken = [reading for reading in report.readings if reading.state == "broken"]
    if broken:
        return "rolled_back", f"{sentences(broken)} (after {report.groups} groups)"
    counted = f"{report.groups} of {gates.min_groups} groups"
    if report.groups >= gates.min_groups and all(each.state == "holds" for each in report.readings):
        return "promoted", f"{counted}; {sentences(report.readings)}"
    if open_s >= gates.deadline_s:
        return (
            "rolled_back",
            f"not decided within {gates.deadline_s:g} s: {counted}; {sentences(report.readings)}",
        )
    return None


def sentences(readings: Sequence[GateReading]) -> str:
    """The readings in words."""
    return "; ".join(map(_sentence, readings)) or "no gate is set"


def _sentence(reading: GateReading) -> str:
    if reading.value is None:
        return f"{reading.gate} is {reading.state}"
    interval = ""
    if reading.low is not None and reading.high is not None:
        interval = f" (from {reading.low:.4g} to {reading.high:.4g})"
    return (
        f"{reading.gate} {reading.state}: {reading.value:.4g}{interval}, bound {reading.bound:g}, "
        f"{reading.count} groups"
    )
