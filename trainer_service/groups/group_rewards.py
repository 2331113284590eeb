"""Collects the rewards of complete groups, for the guards and for the comparison of versions."""

from collections import deque
from collections.abc import Collection
from statistics import fmean

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import sampled_by
from trainer_service.groups.version_scores import ScoreState, VersionScores

LARGEST = 1e30
"""A larger reward counts as this, so that no sum of rewards or of their squares overflows."""
KEPT = 4096
"""The guards get at most so many means, the newest: while the training is paused, they ask for none."""


class GroupRewards:
    """Counts each group once, when it is complete. It may wait for its step for many polls."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self._means = deque[float](maxlen=KEPT)
        self._evaluations = deque[tuple[int, float]](maxlen=KEPT)
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
                    self.by_version.add(version, rewards[-1])
        if rewards:
            self._means.append(fmean(rewards))
        self.compared += len(rewards) > 1
        self.different += len(set(rewards)) > 1
        for evaluation in (member.evaluation for member in group.members if member.evaluation):
            if not evaluation.failed and evaluation.reward is not None and evaluation.version is not None:
                reward = _bounded(evaluation.reward)
                self._evaluations.append((evaluation.version, reward))
                self.by_version.add(evaluation.version, reward, "evaluation")

    def keep(self, group_ids: Collection[str]) -> None:
        """Forget all counted groups except these: the other groups have ended."""
        self._counted.intersection_update(group_ids)

    def take_means(self) -> list[float]:
        """The mean reward of each group that was counted since the last call."""
        means = list(self._means)
        self._means.clear()
        return means

    def take_evaluations(self) -> list[tuple[int, float]]:
        """The version and the reward of each evaluation session that was counted since the last call."""
        rewards = list(self._evaluations)
        self._evaluations.clear()
        return rewards


def _bounded(reward: float) -> float:
    return min(max(reward, -LARGEST), LARGEST)
