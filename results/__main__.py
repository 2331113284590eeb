"""Makes the runs of experiments that are missing, and writes their figures.

python -m results countdown [--variants async sync] [--seeds 0 1 2]
python -m results --report          writes README.md and the pictures of what is in results/data

Each run writes results/data/NAME-VARIANT-seedN.json. A run whose file exists is skipped, so the same command
goes on where it was stopped. The variant `trl` is the same task with TRL, where TRL can express it.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from results.experiment import Experiment
from results.experiments import EXPERIMENTS
from results.figures import TrialResult
from results.report import DATA, write_report
from results.trial import Place, run
from results.trl.beside import TRL, run_trl


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="results", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("experiments", nargs="*", choices=[*EXPERIMENTS, []], metavar="EXPERIMENT")
    parser.add_argument("--variants", nargs="+", help="those of the experiment; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("run/results"), help="for what the runs leave")
    parser.add_argument("--data", type=Path, default=DATA, help="for the figures")
    parser.add_argument("--models", type=Path, default=Path("run/models"))
    parser.add_argument("--report", action="store_true", help="write README.md and the pictures")
    asked = parser.parse_args(arguments)
    place = Place(asked.work, asked.models)
    for experiment in (EXPERIMENTS[name] for name in asked.experiments):
        for name, seed, path in _missing(experiment, asked.variants, asked.seeds, asked.data):
            result = _made(experiment, name, seed, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
            print(f"{path}: {result.before.mean:.3f} → {result.after.mean:.3f}", flush=True)
    if asked.report:
        write_report(asked.data)


def _missing(
    experiment: Experiment, variants: Sequence[str] | None, seeds: Sequence[int], data: Path
) -> Iterator[tuple[str, int, Path]]:
    known = [*experiment.variants, *([TRL] if experiment.trl_batch else [])]
    for seed in seeds:
        for name in known:
            path = data / f"{experiment.name}-{name}-seed{seed}.json"
            if (variants is None or name in variants) and not path.exists():
                yield name, seed, path


def _made(experiment: Experiment, name: str, seed: int, place: Place) -> TrialResult:
    def say(line: str) -> None:
        print(f"{experiment.name} {name} {seed}: {line}", flush=True)

    made = run_trl if name == TRL else run
    return made(experiment, name, seed, place, say)


if __name__ == "__main__":
    main()
