"""How versions do in sessions that are never trained: opened with `train: false`, or pinned to a version.

Session ─ evaluation_of ─▶ Evaluation ─▶ Evaluations.add ─▶ EvaluationScore, by version
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from rollout_queue.contract.records import Outcome, Reward, Turn

ENDS = ("rewarded", "unrewarded", "failed")
VERSIONS_KEPT = 16
"""Versions whose scores are kept: the ones that were evaluated last."""

STEPS_KEPT = 1000
"""Versions whose steps are remembered."""


@dataclass(frozen=True)
class Evaluation:
    """One session of that kind, when it has ended."""

    version: int | None
    """Which version sampled it, or most of its tokens; None where none did."""
    reward: float | None
    """All of its rewards added up; None where nobody rewarded it, which is not 0."""
    failed: bool


class EvaluationScore(msgspec.Struct, frozen=True):
    """What is known of one version."""

    version: int
    rewarded: int = 0
    unrewarded: int = 0
    failed: int = 0
    """Also those that were abandoned; whatever reward they have is not counted."""
    total: float = 0.0
    """The rewards of those that are `rewarded`."""

    @property
    def reward(self) -> float:
        """Mean over those that ended and were rewarded; NaN before the first."""
        return self.total / self.rewarded if self.rewarded else float("nan")

    def values(self) -> dict[str, float]:
        """By the names that the metrics carry; no reward before there is one."""
        counts = {f"eval/{end}": getattr(self, end) for end in ENDS}
        return counts | ({"eval/reward": self.reward} if self.rewarded else {})

    def with_(self, evaluation: Evaluation) -> "EvaluationScore":
        if evaluation.failed:
            return msgspec.structs.replace(self, failed=self.failed + 1)
        if evaluation.reward is None:
            return msgspec.structs.replace(self, unrewarded=self.unrewarded + 1)
        total = self.total + evaluation.reward
        return msgspec.structs.replace(self, rewarded=self.rewarded + 1, total=total)


class EvaluationState(msgspec.Struct, frozen=True):
    """What a checkpoint holds of it."""

    scores: list[EvaluationScore] = []
    """The version that was evaluated last comes last."""
    steps: dict[int, int] = {}
    """Which step made a version."""


class Evaluations:
    """The scores of the versions that were evaluated last, and the steps that made them."""

    def __init__(self, kept: EvaluationState | None = None) -> None:
        kept = kept or EvaluationState()
        self._scores = {each.version: each for each in kept.scores}
        self._steps = dict(kept.steps)

    @property
    def kept(self) -> EvaluationState:
        return EvaluationState(list(self._scores.values()), dict(self._steps))

    def made(self, version: int, step: int) -> None:
        self._steps[version] = step
        for oldest in list(self._steps)[:-STEPS_KEPT]:
            del self._steps[oldest]

    def step_of(self, version: int) -> int:
        """The step that made a version, or the last before it; 0 of one that no known step made."""
        return max((step for made, step in self._steps.items() if made <= version), default=0)

    def add(self, evaluations: Iterable[Evaluation]) -> list[EvaluationScore]:
        """Count sessions; returns the scores that this changed. One that sampled nothing is of no version."""
        changed: dict[int, EvaluationScore] = {}
        for each in evaluations:
            if each.version is not None:
                before = self._scores.pop(each.version, EvaluationScore(each.version))
                self._scores[each.version] = changed[each.version] = before.with_(each)
        return list(changed.values())

    def forget(self) -> list[int]:
        """Let go of all versions but the last few; returns those that are forgotten."""
        gone = list(self._scores)[:-VERSIONS_KEPT]
        for version in gone:
            del self._scores[version]
        return gone

    def told(self) -> dict[str, float]:
        """For `/status`: as `eval/12/reward`."""
        return {
            name.replace("eval/", f"eval/{each.version}/"): value
            for each in self._scores.values()
            for name, value in each.values().items()
        }


def evaluation_of(
    turns: Sequence[Turn], rewards: Sequence[Reward], outcome: Outcome | None
) -> Evaluation | None:
    """What a session says of a version; None where it is to be trained, or was deleted."""
    if outcome is None or (outcome.train and not (turns and all(turn.pinned for turn in turns))):
        return None
    reward = sum(each.value for each in rewards) if rewards else None
    return Evaluation(sampled_by(turns), reward, outcome.status in ("failed", "abandoned"))


def sampled_by(turns: Sequence[Turn]) -> int | None:
    """The version of most of their tokens, the older of two equals; None where there are no tokens."""
    tokens: Counter[int] = Counter()
    for turn in turns:
        for span in turn.versions:
            tokens[span.version] += span.end - span.start
    return min(tokens, key=lambda each: (-tokens[each], each), default=None)
