"""Measures the gain of asynchronous training with tools that are sometimes slow, on the real stack.

python -m bench.asynchrony [--staleness 0 4] [--seeds 0 1 2] [--minutes 30] [--results DIR] [--table]

Tool times are log-normal, one second in the mean and ten at most, and the same at every staleness. Staleness
0 is synchronous: the agents play the episodes of the next step, and the trainer waits for all of them. A run
ends when its reward reaches the target, so that all runs have learned equally much. Rates are over the whole
run. Results are kept as in `bench.learning`."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from bench.results import Result, ResultFolder, Trial, run_missing

HEAD = (
    *("staleness ≤", "seed", "episodes/h", "s to the target", "reward: of the last episodes", "at the end"),
    *("trainer: trains", "publishes", "idle", "engine: idle", "requests", "staleness: mean", "largest"),
)


def table(results: Sequence[Result]) -> str:
    """A Markdown table with a line for each run, then the gain of each seed over its synchronous run."""
    rows = [HEAD, ("---",) * len(HEAD), *map(_row, results)]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *_gains(results)])


def _row(result: Result) -> tuple[str, ...]:
    trial = result.trial
    last = "-" if result.reward_last is None else f"{result.reward_last:.2f}"
    return (
        *(str(trial.max_staleness), str(trial.seed), f"{result.whole.episodes_per_hour:.0f}"),
        *("never" if result.reached is None else f"{result.reached.seconds:.0f}", last),
        f"{result.reward_final:.2f}",
        *(f"{share:.0%}" for share in (result.trains, result.publishes, result.trainer_idle)),
        *(f"{result.engine_idle:.0%}", f"{result.engine_running:.1f}"),
        *(f"{result.staleness_mean:.2f}", f"{result.staleness_max:.0f}"),
    )


def _gains(results: Sequence[Result]) -> list[str]:
    """Episodes per hour, relative to the synchronous run of the same seed."""
    synchronous = {each.trial.seed: each for each in results if not each.trial.max_staleness}
    lines = []
    for versions in sorted({each.trial.max_staleness for each in results} - {0}):
        gains = {
            each.trial.seed: each.whole.episodes_per_hour
            / synchronous[each.trial.seed].whole.episodes_per_hour
            for each in results
            if each.trial.max_staleness == versions and each.trial.seed in synchronous
        }
        if gains:
            listed = ", ".join(f"{gain:.2f} (seed {seed})" for seed, gain in sorted(gains.items()))
            mean = f"{fmean(gains.values()):.2f} in the mean"
            lines.append(f"staleness ≤ {versions}, times the synchronous episodes per hour: {listed}; {mean}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="limit of a run that does not reach the target"
    )
    parser.add_argument("--results", type=Path, default=Path("run/asynchrony"))
    parser.add_argument("--models", type=Path, default=Path("run/models"))
    parser.add_argument(
        "--table", action="store_true", help="print the table of existing results, and run nothing"
    )
    asked = parser.parse_args(arguments)
    folder, failed = ResultFolder(asked.results), 0
    if not asked.table:
        from bench.trial import Bounds, run

        trials = [Trial("slow", versions, seed) for seed in asked.seeds for versions in asked.staleness]
        bounds = Bounds(target=asked.target, seconds=60 * asked.minutes)
        failed = run_missing(
            folder, trials, partial(run, bounds=bounds, folder=asked.results, models=asked.models)
        )
    print(table(folder.results()))
    if failed:
        raise SystemExit(f"{failed} runs failed; the same command repeats them")


if __name__ == "__main__":
    main()
