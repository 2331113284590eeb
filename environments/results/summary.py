"""The summary of a run: its mean reward with an interval, pass@k, a row for each task, and what failed."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from environments.results.intervals import mean_interval, pass_at_k, wilson
from environments.results.journal import EpisodeEnded

KS = (1, 2, 4, 8, 16, 32, 64)
PASSES_AT = 1.0
"""An episode passes if its reward is at least this."""
WINDOW = 128


def rewards_by_task(ended: Sequence[EpisodeEnded]) -> dict[str, list[float]]:
    """The rewards of the episodes that were judged."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in ended:
        if each.reward is not None and each.status in ("completed", "truncated"):
            found[each.task_id].append(each.reward)
    return dict(found)


def summary_of(ended: Sequence[EpisodeEnded], mode: str) -> dict[str, Any]:
    """A document for `summary.json`. In training rewards change as the model learns, so there is no
    interval."""
    rewards = rewards_by_task(ended)
    judged = [reward for each in rewards.values() for reward in each]
    document: dict[str, Any] = {
        "episodes": len(ended),
        "judged": len(judged),
        "by_status": dict(Counter(each.status for each in ended)),
        "reasons": dict(Counter(each.reason for each in ended if each.reason).most_common(10)),
        "turns": sum(each.turns for each in ended),
    }
    if not judged:
        return document
    if mode == "train":
        return document | {
            "reward_start": fmean(judged_in_order(ended)[:WINDOW]),
            "reward_end": fmean(judged_in_order(ended)[-WINDOW:]),
        }
    mean, low, high = mean_interval(rewards)
    passed = {task: sum(reward >= PASSES_AT for reward in each) for task, each in rewards.items()}
    return document | {
        "reward": {"mean": mean, "low": low, "high": high},
        "pass_rate": _rate(sum(passed.values()), len(judged)),
        "pass_at_k": _pass_at_k(rewards, passed),
        "versions": dict(Counter(version for each in ended for version in each.versions)),
        "tasks": [
            {"task_id": task, "episodes": len(each), "reward": fmean(each), "passed": passed[task]}
            for task, each in sorted(rewards.items())
        ],
    }


def judged(summary: dict[str, Any]) -> str:
    """The mean reward of an evaluation with its interval, as a text."""
    if (reward := summary.get("reward")) is None:
        return "no episode was judged"
    return f"{reward['mean']:.4f} [{reward['low']:.4f}, {reward['high']:.4f}]"


def judged_in_order(ended: Sequence[EpisodeEnded]) -> list[float]:
    in_order = sorted(ended, key=lambda each: each.ended_at)
    return [each.reward for each in in_order if each.reward is not None]


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
