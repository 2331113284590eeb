"""Draws the rewards of a run: the moving mean in training, a bar for each task in an evaluation."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from environments.results.journal import EpisodeEnded
from environments.results.summary import WINDOW, judged_in_order


def draw(path: Path, title: str, ended: Sequence[EpisodeEnded]) -> None:
    """Write a PNG of the mean reward of the last 128 episodes; nothing without rewards."""
    import matplotlib  # takes half a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = judged_in_order(ended)
    if not rewards:
        return
    means = [fmean(rewards[max(0, place - WINDOW) : place]) for place in range(1, len(rewards) + 1)]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(means) + 1), means)
    axes.set(xlabel="episodes", ylabel=f"mean reward of the last {WINDOW}", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
