"""The summary of a run: its mean reward with an interval, pass@k, a row for each task, and what failed."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from environments.results.intervals import mean_interval, pass_at_k, wilson
from environments.results.journal import EpisodeEnded
from environments.settings import Mode

KS = (1, 2, 4, 8, 16, 32, 64)
PASSES_AT = 1.0
"""An episode passes if its reward is at least this."""
WINDOW = 128


@dataclass
class RunResults:
    """What the episodes of a run came to. Of an episode it keeps its reward alone; by task, too, if this is
    an evaluation, and otherwise whether those of a group differ."""

    mode: Mode
    episodes: int = 0
    judged: int = 0
    turns: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    by_group: dict[tuple[int, int], tuple[int, float, bool]] = field(default_factory=dict)
    """By group and seat: how many rewards it has, the first, and whether another one differs."""
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    """In the order in which the episodes ended."""
    by_task: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, ended: Iterable[EpisodeEnded], mode: Mode) -> Self:
        results = cls(mode)
        for each in ended:
            results.add(each)
        return results

    def add(self, entry: EpisodeEnded) -> None:
        """Count an episode, which ended after those that were added before."""
        self.episodes += 1
        self.turns += entry.turns
        self.statuses[entry.status] += 1
        self.versions.update(entry.versions)
        if entry.reason:
            self.reasons[entry.reason] += 1
        if entry.reward is not None:
            self.rewards.append(entry.reward)
            if entry.status in ("completed", "truncated"):
                self.judged += 1
                self._judge(entry, entry.reward)

    def _judge(self, entry: EpisodeEnded, reward: float) -> None:
        if self.mode == "eval":
            self.by_task[entry.task_id].append(reward)
            return
        key = (entry.group, entry.seat)
        count, first, differs = self.by_group.get(key, (0, reward, False))
        self.by_group[key] = (count + 1, first, differs or reward != first)

    def document(self) -> dict[str, Any]:
        """A document for `summary.json`. In training rewards change as the model learns, so there is no
        interval."""
        document: dict[str, Any] = {
            "episodes": self.episodes,
            "judged": self.judged,
            "by_status": dict(self.statuses),
            "reasons": dict(self.reasons.most_common(10)),
            "turns": self.turns,
        }
        if not self.judged:
            return document
        if self.mode == "train":
            start, end = self.rewards[:WINDOW], self.rewards[-WINDOW:]
            compared = [differs for count, _, differs in self.by_group.values() if count > 1]
            document["groups"] = {"compared": len(compared), "different": sum(compared)}
            return document | {"reward_start": fmean(start), "reward_end": fmean(end)}
        return document | self._evaluated()

    def _evaluated(self) -> dict[str, Any]:
        mean, low, high = mean_interval(self.by_task)
        passed = {task: sum(reward >= PASSES_AT for reward in each) for task, each in self.by_task.items()}
        return {
            "reward": {"mean": mean, "low": low, "high": high},
            "pass_rate": _rate(sum(passed.values()), self.judged),
            "pass_at_k": _pass_at_k(self.by_task, passed),
            "versions": dict(self.versions),
            "tasks": [
                {"task_id": task, "episodes": len(each), "reward": fmean(each), "passed": passed[task]}
                for task, each in sorted(self.by_task.items())
            ],
        }


def rewards_by_task(ended: Iterable[EpisodeEnded]) -> dict[str, list[float]]:
    """The rewards of the episodes that were judged."""
    return dict(RunResults.of(ended, "eval").by_task)


def judged(summary: dict[str, Any]) -> str:
    """The mean reward of an evaluation with its interval, as a text."""
    if (reward := summary.get("reward")) is None:
        return "no episode was judged"
    return f"{reward['mean']:.4f} [{reward['low']:.4f}, {reward['high']:.4f}]"


def _rate(passed: int, count: int) -> dict[str, float]:
    low, high = wilson(passed, count)
    return {"mean": passed / count, "low": low, "high": high}


def _pass_at_k(rewards: dict[str, list[float]], passed: dict[str, int]) -> dict[str, float]:
    """The mean over tasks, for each k for which every task has enough samples."""
    fewest = min(len(each) for each in rewards.values())
    return {
        str(k): fmean(pass_at_k(len(each), passed[task], k) for task, each in rewards.items())
        for k in KS
        if k <= fewest
    }
