"""Draws the rewards of a run: the moving mean, and those of the evaluations during it."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from environments.results.summary import WINDOW


def draw_evaluations(path: Path, title: str, evaluations: Sequence[dict[str, Any]]) -> None:
    """Write a PNG of each evaluation's mean reward with its interval; nothing without rewards."""
    import matplotlib  # takes half a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = [(each["version"], each["reward"]) for each in evaluations if each.get("reward")]
    if not known:
        return
    versions, rewards = zip(*known, strict=True)
    means = [each["mean"] for each in rewards]
    below = [each["mean"] - each["low"] for each in rewards]
    above = [each["high"] - each["mean"] for each in rewards]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.errorbar(versions, means, yerr=(below, above), marker="o", capsize=3)
    axes.set(xlabel="policy version at the start", ylabel="mean reward, 95 % interval", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw(path: Path, title: str, rewards: Sequence[float]) -> None:
    """Write a PNG of the mean reward of the last 128 episodes; nothing without rewards."""
    if not rewards:
        return
    import matplotlib  # takes half a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    means = [fmean(rewards[max(0, place - WINDOW) : place]) for place in range(1, len(rewards) + 1)]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(means) + 1), means)
    axes.set(xlabel="episodes", ylabel=f"mean reward of the last {WINDOW}", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
