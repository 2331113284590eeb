"""The rewards of complete groups, each counted once: what guards watch, and what versions are compared by."""

from collections.abc import Collection
from statistics import fmean

from trainer_service.groups.assemble import Group
from trainer_service.groups.evaluation import sampled_by
from trainer_service.groups.version_scores import VersionScores


class GroupRewards:
    """A group is screened again and again until its step comes; its rewards count the first time."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        """Ids of the groups that are still there and are counted already."""
        self._means: list[float] = []
        self.by_version = VersionScores()

    def add(self, group: Group) -> None:
        """Count a group's rewarded rollouts. Evaluation sessions are not training and do not count."""
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

    def keep(self, group_ids: Collection[str]) -> None:
        """Forget which groups were counted, but for those with these ids."""
        self._counted.intersection_update(group_ids)

    def take_means(self) -> list[float]:
        """The mean reward of each group that was counted since the last call."""
        means, self._means = self._means, []
        return means
