"""How well each version does in sessions that are never trained: those that were opened with `train: false`,
and those of which every call named a version.

    a session that ended ─ evaluation_of ─▶ Evaluation ─ Evaluations.add ─▶ EvaluationScore of its version
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from rollout_queue.contract.records import Outcome, Reward, Turn

ENDS = ("rewarded", "unrewarded", "failed")
VERSIONS_KEPT = 16
"""How many versions keep their score: those that were evaluated last."""

STEPS_KEPT = 1000
"""For how many versions it is remembered which step made them."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation session that has ended."""

    version: int | None
    """The version that sampled most of its tokens; None where it has no tokens."""
    reward: float | None
    """The sum of its rewards; None, and not 0, where nobody rewarded it."""
    failed: bool


class EvaluationScore(msgspec.Struct, frozen=True):
    """The evaluation sessions of one version. Checkpoints store it."""

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
        """By metric name. There is no `eval/reward` before the first reward."""
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
    """What a checkpoint stores of all evaluations."""

    scores: list[EvaluationScore] = []
    """The version that was evaluated last comes last."""
    steps: dict[int, int] = {}
    """Which step made a version."""


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
        """`step` made `version`."""
        self._steps[version] = step
        for oldest in list(self._steps)[:-STEPS_KEPT]:
            del self._steps[oldest]

    def step_of(self, version: int) -> int:
        """The step that made a version, or the last known step before it; 0 where there is none."""
        return max((step for made, step in self._steps.items() if made <= version), default=0)

    def add(self, evaluations: Iterable[Evaluation]) -> list[EvaluationScore]:
        """Count sessions, but not those without tokens. Returns the scores that changed."""
        changed: dict[int, EvaluationScore] = {}
        for each in evaluations:
            if each.version is not None:
                before = self._scores.pop(each.version, EvaluationScore(each.version))
                self._scores[each.version] = changed[each.version] = before.plus(each)
        return list(changed.values())

    def forget_oldest(self) -> list[int]:
        """Keep the scores of the last VERSIONS_KEPT versions. Returns the versions that are forgotten."""
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
    """The session as an evaluation; None where it is to be trained, or was deleted."""
    if outcome is None or (outcome.train and not (turns and all(turn.pinned for turn in turns))):
        return None
    reward = sum(each.value for each in rewards) if rewards else None
    return Evaluation(sampled_by(turns), reward, outcome.status in ("failed", "abandoned"))


def sampled_by(turns: Sequence[Turn]) -> int | None:
    """The version that sampled most of the tokens, the older of two with as many; None without tokens."""
    tokens: Counter[int] = Counter()
    for turn in turns:
        for span in turn.versions:
            tokens[span.version] += span.end - span.start
    return min(tokens, key=lambda each: (-tokens[each], each), default=None)
