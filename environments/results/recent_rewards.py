"""The moving average of rewards, by which a run sees that the model has learned."""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RecentRewards:
    """The mean of the last 128 rewards, and of the first 128."""

    window: deque[float] = field(default_factory=lambda: deque(maxlen=128))
    first: float | None = None
    count: int = 0

    def add(self, reward: float) -> None:
        self.count += 1
        self.window.append(reward)
        if self.first is None:
            self.first = self.mean

    @property
    def mean(self) -> float | None:
        full = self.window.maxlen
        return sum(self.window) / len(self.window) if len(self.window) == full else None
