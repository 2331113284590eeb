"""Scores versions by their evaluation sessions: those opened with `train: false`, and those in which every
call named a version. Evaluation sessions are never trained.

    a session that ended ─ evaluation_of ─▶ Evaluation ─ Evaluations.add ─▶ EvaluationScore of its version
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from rollout_queue.contract.records import Outcome, Reward, Turn

ENDS = ("rewarded", "unrewarded", "failed")
VERSIONS_KEPT = 16
"""How many scores are kept. The versions that were evaluated last keep theirs."""

STEPS_KEPT = 1000
"""How many versions are remembered with the step that made them."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation session that has ended."""

    version: int | None
    """The version that sampled most of its tokens; None if it has no sampled tokens."""
    reward: float | None
    """The sum of its rewards; None if it has no reward."""
    failed: bool


class EvaluationScore(msgspec.Struct, frozen=True):
    """Counts of one version's evaluation sessions, and their rewards. Checkpoints store it."""

    version: int
    rewarded: int = 0
    unrewarded: int = 0
    failed: int = 0
    """Sessions that failed or were abandoned. Their rewards do not count."""
    total: float = 0.0
    """The sum of the rewards of the `rewarded` sessions."""

    @property
    def reward(self) -> float:
        """The mean over the `rewarded` sessions; NaN before the first."""
        return self.total / self.rewarded if self.rewarded else float("nan")

    def metrics(self) -> dict[str, float]:
        """The score by metric name, without `eval/reward` before the first reward."""
        counts = {f"eval/{end}": getattr(self, end) for end in ENDS}
        return counts | ({"eval/reward": self.reward} if self.rewarded else {})

    def plus(self, evaluation: Evaluation) -> "EvaluationScore":
        if evaluation.failed:
            return msgspec.structs.replace(self, failed=self.failed + 1)
        if evaluation.reward is None:
            return msgspec.structs.replace(self, unrewarded=self.unrewarded + 1)
        total = self.total + evaluation.reward
        return msgspec.structs.replace(self, rewarded=self.rewarded + 1, total=total)


class EvaluationState(msgspec.Struct, frozen=True):
    """The `Evaluations`, as a checkpoint stores them."""

    scores: list[EvaluationScore] = []
    """The version that was evaluated last comes last."""
    steps: dict[int, int] = {}
    """The step that made each version."""


class Evaluations:
    """The scores of the versions that were evaluated last, and the steps that made them."""

    def __init__(self, state: EvaluationState | None = None) -> None:
        state = state or EvaluationState()
        self._scores = {each.version: each for each in state.scores}
        self._steps = dict(state.steps)

    @property
    def state(self) -> EvaluationState:
        return EvaluationState(list(self._scores.values()), dict(self._steps))

    def note_version(self, version: int, step: int) -> None:
        """Note that `step` made `version`."""
        self._steps[version] = step
        for oldest in list(self._steps)[:-STEPS_KEPT]:
            del self._steps[oldest]

    def step_of(self, version: int) -> int:
        """The step that made `version`. If that is not known, the step of the newest older version that is
        known; 0 if there is none."""
        return max((step for made, step in self._steps.items() if made <= version), default=0)

    def add(self, evaluations: Iterable[Evaluation]) -> list[EvaluationScore]:
        """Count sessions, except those without sampled tokens. Returns the scores that changed."""
        changed: dict[int, EvaluationScore] = {}
        for each in evaluations:
            if each.version is not None:
                before = self._scores.pop(each.version, EvaluationScore(each.version))
                self._scores[each.version] = changed[each.version] = before.plus(each)
        return list(changed.values())

    def forget_oldest(self) -> list[int]:
        """Keep the scores of the VERSIONS_KEPT versions that were evaluated last. Returns the others."""
        gone = list(self._scores)[:-VERSIONS_KEPT]
        for version in gone:
            del self._scores[version]
        return gone

    def metrics(self) -> dict[str, float]:
        """All scores by metric name and version, for `/status`: `eval/12/reward`."""
        return {
            name.replace("eval/", f"eval/{each.version}/"): value
            for each in self._scores.values()
            for name, value in each.metrics().items()
        }


def evaluation_of(
    turns: Sequence[Turn], rewards: Sequence[Reward], outcome: Outcome | None
) -> Evaluation | None:
    """The session as an evaluation; None if it is to be trained, was deleted, or has no outcome yet."""
    if outcome is None or (outcome.train and not (turns and all(turn.pinned for turn in turns))):
        return None
    reward = sum(each.value for each in rewards) if rewards else None
    return Evaluation(sampled_by(turns), reward, outcome.status in ("failed", "abandoned"))


def sampled_by(turns: Sequence[Turn]) -> int | None:
    """The version that sampled most of the tokens; the oldest if several sampled as many; None without
    tokens."""
    tokens: Counter[int] = Counter()
    for turn in turns:
        for span in turn.versions:
            tokens[span.version] += span.end - span.start
    return max(sorted(tokens), key=tokens.__getitem__, default=None)
