"""Measures whether the model learns at different bounds of staleness, on the real stack, for several seeds.

python -m bench.learning [--task tool|guess] [--staleness 0 2 4 8] [--seeds 0 1 2 3 4] [--minutes 15]
                         [--results DIR] [--table] [--plot FILE]

Each run writes a file into `--results`. A run whose file exists is skipped, so you may stop at any time and
continue with the same command. `--table` prints the existing results, and runs nothing."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.results import Result, ResultFolder, Trial, run_missing

DEFAULT_RUNS = {"tool": ([0, 2, 4, 8], [0, 1, 2, 3, 4]), "guess": ([4], [0, 1, 2])}
"""The default bounds of staleness and the default seeds of each task."""
HEAD = (
    *("task", "staleness ≤", "seed", "steps", "episodes", "s to the target", "reward: warm start"),
    *("of the last episodes", "at the end", "staleness: mean", "largest", "stale sessions"),
)
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def table(results: Sequence[Result]) -> str:
    """A Markdown table with a line for each run, then a sentence for each task and bound of staleness."""
    kinds = sorted({(result.trial.task, result.trial.max_staleness) for result in results})
    summaries = [
        _summary([each for each in results if (each.trial.task, each.trial.max_staleness) == kind])
        for kind in kinds
    ]
    rows = [HEAD, ("---",) * len(HEAD), *map(_row, results)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *summaries])


def _row(result: Result) -> tuple[str, ...]:
    trial, whole = result.trial, result.whole
    reached = "never" if result.reached is None else f"{result.reached.seconds:.0f}"
    last = "-" if result.reward_last is None else f"{result.reward_last:.2f}"
    return (
        *(trial.task, str(trial.max_staleness), str(trial.seed), str(whole.steps), str(whole.episodes)),
        *(reached, f"{result.reward_warm:.2f}", last, f"{result.reward_final:.2f}"),
        *(f"{result.staleness_mean:.2f}", f"{result.staleness_max:.0f}"),
        str(result.verdicts.get("stale", 0)),
    )


def _summary(results: Sequence[Result]) -> str:
    """How many seeds reached the target, and the smallest gain of a seed."""
    trial = results[0].trial
    reached = sum(result.reached is not None for result in results)
    gained = min(result.reward_final - result.reward_warm for result in results)
    return (
        f"{trial.task}, staleness ≤ {trial.max_staleness}: {reached} of {len(results)} seeds reach the "
        f"target; the smallest gain of a seed is {100 * gained:.0f} points"
    )


def draw(path: Path, results: Sequence[Result], target: float) -> None:
    """Plot the moving average of the reward (of the last 128 rewarded episodes) against the number of
    episodes played. Each task and bound of staleness has a panel, and each seed a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = sorted({(result.trial.task, result.trial.max_staleness) for result in results})
    figure, row = plt.subplots(
        1, len(kinds), figsize=(3.5 * len(kinds), 3), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, kind in zip(row[0], kinds, strict=True):
        for result in results:
            if (result.trial.task, result.trial.max_staleness) == kind:
                episodes, _, rewards = zip(*result.curve, strict=True) if result.curve else ((), (), ())
                colour = COLOURS[result.trial.seed % len(COLOURS)]
                panel.plot(episodes, rewards, color=colour, label=f"seed {result.trial.seed}")
        panel.axhline(target, color="tab:gray", linestyle="--", linewidth=1)
        panel.set(title=f"{kind[0]}, staleness ≤ {kind[1]}", xlabel="episode", ylim=(0, 1.02))
    row[0][0].set(ylabel="reward of the last 128")
    row[0][-1].legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=DEFAULT_RUNS, default="tool")
    parser.add_argument("--staleness", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="limit of a run that does not reach the target"
    )
    parser.add_argument("--results", type=Path, default=Path("run/learning"))
    parser.add_argument("--models", type=Path, default=Path("run/models"))
    parser.add_argument(
        "--table", action="store_true", help="print the table of existing results, and run nothing"
    )
    parser.add_argument("--plot", type=Path, help="plot the existing results into this file")
    asked = parser.parse_args(arguments)
    folder, failed = ResultFolder(asked.results), 0
    if not asked.table:
        from bench.trial import Bounds, run

        staleness, seeds = DEFAULT_RUNS[asked.task]
        trials = [
            Trial(asked.task, versions, seed)
            for seed in asked.seeds or seeds
            for versions in asked.staleness or staleness
        ]
        bounds = Bounds(target=asked.target, seconds=60 * asked.minutes)
        failed = run_missing(
            folder, trials, partial(run, bounds=bounds, folder=asked.results, models=asked.models)
        )
    results = folder.results()
    print(table(results))
    if asked.plot:
        draw(asked.plot, results, asked.target)
    if failed:
        raise SystemExit(f"{failed} runs failed; the same command repeats them")


if __name__ == "__main__":
    main()
