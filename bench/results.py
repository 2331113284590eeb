"""Results of training runs, one JSON file each, so that a benchmark can be stopped and continued.

Trial ─▶ (hours) ─▶ Result ─▶ NAME.json ─▶ table, plot
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from weir.errors import StackError


class Trial(msgspec.Struct, frozen=True):
    """What distinguishes one run of training from others."""

    task: str
    """One of `bench.tasks.TASKS`."""
    max_staleness: int
    """The bound in trainer and gateway. 0 is synchronous training, which waits for every rollout."""
    seed: int
    """The seed of warm start, tasks, sampling and trainer."""

    @property
    def name(self) -> str:
        return f"{self.task}-staleness{self.max_staleness}-seed{self.seed}"


class Progress(msgspec.Struct, frozen=True):
    """How far a run has come at one moment."""

    seconds: float
    episodes: int
    steps: int

    @property
    def episodes_per_hour(self) -> float:
        return 3600 * self.episodes / self.seconds


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run of training. Shares are of the seconds in `whole`."""

    trial: Trial
    ended: str
    """Why the run ended, as a sentence."""
    reached: Progress | None
    """When the mean reward of the last episodes reached the target; None if it never did."""
    whole: Progress
    """When the run ended: at the target, or at a bound of time or episodes."""
    reward_warm: float
    """Mean reward of evaluation sessions before the first step."""
    reward_last: float | None
    """Mean reward of the last episodes."""
    reward_final: float
    """Mean reward of evaluation sessions at the end."""
    staleness_mean: float
    """Mean number of versions between sampling and training, over the trained rows."""
    staleness_max: float
    abs_logp: float
    """Mean |Δlogprob| between trainer and engine, in nats per token."""
    trains: float
    """Share of the time that the trainer spent on steps, checkpoints and acknowledgements."""
    publishes: float
    """Share of the time that the trainer spent on publishing weights."""
    engine_idle: float
    """Share of status requests to the engine that found it idle."""
    engine_running: float
    """Mean number of requests at the engine, waiting ones included."""
    failures: int
    verdicts: dict[str, int]
    """Number of sessions by verdict, evaluations (`not_for_training`) included."""
    seconds: dict[str, float]
    """Seconds of the phases of the run, by name."""
    load: float
    """Load average of the machine at the end of the run."""
    curve: list[tuple[int, float, float]]
    """Points of (episodes, seconds, mean reward of the last episodes)."""

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trains - self.publishes


class ResultFolder:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def results(self) -> list[Result]:
        """All results, in the order of their trials. Raises SystemExit for a file that is no result."""
        found = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda result: msgspec.structs.astuple(result.trial))

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        return [trial for trial in trials if not self._path(trial).exists()]

    def put(self, result: Result) -> None:
        """Write another file first and then rename it, so that a result is always complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(result.trial)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        draft.replace(path)

    def _path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.name}.json"

    def _read(self, path: Path) -> Result:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Result)
        except msgspec.MsgspecError as error:
            raise SystemExit(f"{path} is no result: {error}; delete it to repeat its run") from None


def run_missing(results: ResultFolder, trials: Sequence[Trial], run: Callable[[Trial], Result]) -> int:
    """Make the missing runs, one after the other. Returns how many failed; the results of the others are
    kept."""
    missing, failed = results.missing(trials), 0
    print(f"{len(trials) - len(missing)} of {len(trials)} runs are done already", file=sys.stderr)
    for trial in missing:
        print(f"{trial.name} begins", file=sys.stderr, flush=True)
        try:
            result = run(trial)
        except StackError as error:
            failed += 1
            print(f"{trial.name} failed: {error}", file=sys.stderr, flush=True)
            continue
        results.put(result)
        print(f"{trial.name}: {result.ended}", file=sys.stderr, flush=True)
    return failed
