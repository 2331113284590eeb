"""The step in the making: groups that the policy has learned from while it waits for the others.

groups so far ─ left ─▶ those that are new ─ learn ─▶ begun ─▶ … ─▶ step, with the rest
"""

from collections.abc import Collection, Sequence
from typing import Any

from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.groups.settlement import ScreenedGroup
from trainer_service.rows.rows import Row, micro_batches
from trainer_service.step.ranks import Leader
from trainer_service.step.step_request import StepRequest

Lesson = tuple[Any, ...]
"""What is learned of a group: its rewards and its turns. One that is heard of again may teach the same."""


class Begun:
    """Gradients without a step. They are not durable: after a crash, the stream gives their groups again."""

    def __init__(self, policy: Leader) -> None:
        self._policy = policy
        self._lessons: dict[Lesson, str] = {}
        """And the group of each."""
        self._changes = False
        """Whether a group changed after it was learned from. Then this step is made at once."""
        self.tokens = 0
        """Trained ones."""

    @property
    def group_ids(self) -> Collection[str]:
        return self._lessons.values()

    def drop_if_changed(self, groups: Sequence[ScreenedGroup]) -> None:
        """Forget all of it where a group that is in it is not among `groups` any more, or teaches something
        else: one was deleted, or rewarded again."""
        if not self._lessons.keys() <= {_lesson(judged) for judged in groups}:
            self._policy.forget()
            self._lessons, self._changes, self.tokens = {}, True, 0

    def left(self, groups: Sequence[ScreenedGroup]) -> list[ScreenedGroup]:
        """Those that are still to be learned from."""
        return [judged for judged in groups if _lesson(judged) not in self._lessons]

    def fills_a_pass(self, rows: Sequence[Row], algorithm: AlgorithmSettings) -> bool:
        """Whether each rank has enough to do with them, now."""
        ranks, tokens = self._policy.ranks, sum(len(row) for row in rows)
        if self._changes or tokens < ranks * algorithm.max_tokens:
            return False
        return len(list(micro_batches(rows, algorithm.max_tokens))) >= ranks

    def learn(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> None:
        """The rows of the request are those of `groups`, with their advantages."""
        self._policy.accumulate(request)
        self._lessons |= {_lesson(judged): judged.group.group_id for judged in groups}
        self.tokens += sum(row.trained_tokens for row in request.rows)

    def step(self, groups: Sequence[ScreenedGroup], request: StepRequest) -> dict[str, float]:
        """Learn from the rest of a step's groups, and make the step. The rows of the request are those of all
        `groups`. Returns the step's metrics."""
        self.drop_if_changed(groups)
        left = {row.session_id for judged in self.left(groups) for row in judged.rows}
        early = self.tokens / sum(row.trained_tokens for row in request.rows)
        self._lessons, self._changes, self.tokens = {}, False, 0
        others = [row for row in request.rows if row.session_id in left]
        return self._policy.optimise(request.with_rows(others)) | {"early_frac": early}


def _lesson(judged: ScreenedGroup) -> Lesson:
    rollouts = tuple(
        (rollout.rollout_id, rollout.reward, *sorted(rollout.parts.items())) for rollout in judged.rollouts
    )
    return (rollouts, tuple(row.turn_ids for row in judged.rows))
