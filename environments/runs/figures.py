"""The running figures of a run: all that it keeps of episodes that have ended. The journal has the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.results.journal import EpisodeEnded
from environments.results.recent_rewards import RecentRewards


@dataclass
class RewardSum:
    """The sum of some rewards, and how many they are."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def add(self, reward: float) -> None:
        self.count += 1
        self.total += reward


@dataclass
class RunFigures:
    """Its size does not depend on the number of episodes."""

    ended: int = 0
    failed: int = 0
    last_session: str = ""
    """The session of the episode that ended last."""
    recent: RecentRewards = field(default_factory=RecentRewards)
    groups: int = 0
    """Groups that have ended in this process with two rewards or more; the others cannot be compared."""
    different: int = 0
    """Those whose rewards differ."""
    _fresh: RewardSum = field(default_factory=RewardSum)

    def add(self, entry: EpisodeEnded) -> None:
        """Count an episode that has ended."""
        self.ended += 1
        self.failed += entry.status == "failed"
        self.last_session = entry.session_id
        if entry.reward is not None and entry.status != "failed":
            self.recent.add(entry.reward)
            self._fresh.add(entry.reward)

    def add_group(self, rewards: Sequence[float]) -> None:
        """Count a group that has ended."""
        self.groups += len(rewards) > 1
        self.different += len(set(rewards)) > 1

    def take_fresh(self) -> RewardSum:
        """The rewards since this was called last."""
        fresh, self._fresh = self._fresh, RewardSum()
        return fresh
