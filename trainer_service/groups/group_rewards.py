"""Collects the rewards of complete groups, for the guards and for the comparison of versions."""

from collections import deque
from collections.abc import Collection
from statistics import fmean

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import Evaluation, sampled_by
from trainer_service.groups.reward_guard import EvaluationReward, GroupReward
from trainer_service.groups.version_scores import ScoreState, VersionScores

LARGEST = 1e30
"""A larger reward counts as this, so that no sum of rewards or of their squares overflows."""
KEPT = 4096
"""The guards get at most so many means, the newest: while the training is paused, they ask for none."""


class GroupRewards:
    """Counts each group once, when it is complete. It may wait for its step for many polls."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self._means = deque[GroupReward](maxlen=KEPT)
        self._evaluations = deque[EvaluationReward](maxlen=KEPT)
        self.by_version = VersionScores()
        self.compared = self.different = 0
        """The groups of this process with two rewards or more, and those whose rewards differ."""

    @property
    def counted(self) -> list[str]:
        """Ids of the groups that are counted and have not ended. A restart reads their entries again."""
        return sorted(self._counted)

    def resume(self, scores: ScoreState, counted: Collection[str]) -> None:
        """Continue with what a checkpoint stored."""
        self.by_version.resume(scores)
        self._counted = set(counted)

    def add(self, group: Group) -> None:
        """Count the rewards of a group's rollouts, and those of evaluation sessions apart."""
        if group.group_id in self._counted:
            return
        self._counted.add(group.group_id)
        rewards = []
        for member in group.rollouts:
            if member.evaluation is None and member.reward is not None:
                rewards.append(_bounded(member.reward))
                if (version := sampled_by(member.turns)) is not None:
                    self.by_version.add(version, rewards[-1], task_id=group.task_id)
        if rewards:
            self._means.append(GroupReward(group.task_id, fmean(rewards)))
        self.compared += len(rewards) > 1
        self.different += len(set(rewards)) > 1
        for member in group.members:
            if member.evaluation is not None:
                self._add_evaluation(member.evaluation, member.task_id)

    def _add_evaluation(self, evaluation: Evaluation, task_id: str | None) -> None:
        if not evaluation.failed and evaluation.reward is not None and evaluation.version is not None:
            reward = _bounded(evaluation.reward)
            self._evaluations.append(EvaluationReward(task_id, evaluation.version, reward))
            self.by_version.add(evaluation.version, reward, "evaluation", task_id)

    def keep(self, group_ids: Collection[str]) -> None:
        """Forget all counted groups except these: the other groups have ended."""
        self._counted.intersection_update(group_ids)

    def take_means(self) -> list[GroupReward]:
        """The task and the mean reward of each group that was counted since the last call."""
        means = list(self._means)
        self._means.clear()
        return means

    def take_evaluations(self) -> list[EvaluationReward]:
        """The task, version and reward of each evaluation session that was counted since the last call."""
        rewards = list(self._evaluations)
        self._evaluations.clear()
        return rewards


def _bounded(reward: float) -> float:
    return min(max(reward, -LARGEST), LARGEST)
