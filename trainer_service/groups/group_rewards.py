"""Collects the rewards of complete groups, for the guards and for the comparison of versions."""

from collections.abc import Collection
from statistics import fmean

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import sampled_by
from trainer_service.groups.version_scores import VersionScores


class GroupRewards:
    """Counts each group once, when it is complete. It may wait for its step for many polls."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        """Ids of the groups that are counted and have not ended."""
        self._means: list[float] = []
        self._evaluations: list[float] = []
        self.by_version = VersionScores()

    def add(self, group: Group) -> None:
        """Count the rewards of a group's rollouts, and those of evaluation sessions apart."""
        if group.group_id in self._counted:
            return
        self._counted.add(group.group_id)
        rewards = []
        for member in group.rollouts:
            if member.evaluation is None and member.reward is not None:
                rewards.append(member.reward)
                if (version := sampled_by(member.turns)) is not None:
                    self.by_version.add(version, member.reward)
        if rewards:
            self._means.append(fmean(rewards))
        for evaluation in (member.evaluation for member in group.members if member.evaluation):
            if not evaluation.failed and evaluation.reward is not None:
                self._evaluations.append(evaluation.reward)
                if evaluation.version is not None:
                    self.by_version.add(evaluation.version, evaluation.reward, "evaluation")

    def keep(self, group_ids: Collection[str]) -> None:
        """Forget all counted groups except these: the other groups have ended."""
        self._counted.intersection_update(group_ids)

    def take_means(self) -> list[float]:
        """The mean reward of each group that was counted since the last call."""
        means, self._means = self._means, []
        return means

    def take_evaluations(self) -> list[float]:
        """The reward of each evaluation session that was counted since the last call."""
        rewards, self._evaluations = self._evaluations, []
        return rewards
