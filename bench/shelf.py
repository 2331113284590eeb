"""Runs of training that are done: one JSON file each, so that a bench goes on where it was stopped.

Trial ─▶ (hours) ─▶ Result ─▶ NAME.json ─▶ table, plot
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from weir.errors import StackError


class Trial(msgspec.Struct, frozen=True):
    """One run of training, as far as runs differ."""

    task: str
    """One of `bench.kinds.KINDS`."""
    max_staleness: int
    """Of trainer and gateway; 0 waits for every rollout, and so is synchronous."""
    seed: int
    """Of warm start, tasks, sampling and trainer."""

    @property
    def name(self) -> str:
        return f"{self.task}-staleness{self.max_staleness}-seed{self.seed}"


class Mark(msgspec.Struct, frozen=True):
    """How far a run was at one moment."""

    seconds: float
    episodes: int
    steps: int

    @property
    def episodes_per_hour(self) -> float:
        return 3600 * self.episodes / self.seconds


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of training came to. Shares are of the seconds until `whole`."""

    trial: Trial
    ended: str
    """Why it ended, in words."""
    reached: Mark | None
    """When the mean reward of the last episodes came to the target; None when it never did."""
    whole: Mark
    """When it was enough: at the target, or at a bound."""
    reward_warm: float
    """Mean reward of evaluation sessions before the first step."""
    reward_last: float | None
    """Mean reward of the last episodes."""
    reward_final: float
    """Mean reward of evaluation sessions at the end."""
    staleness_mean: float
    """Versions between sampling and training, over the rows that were trained."""
    staleness_max: float
    abs_logp: float
    """Mean |Δlogprob| of trainer and engine, nats per token."""
    trains: float
    """Share of the time in which the trainer learned, wrote its checkpoint and acknowledged."""
    publishes: float
    """Share in which it brought new weights to the engine."""
    engine_idle: float
    """Share of looks at the engine that found it without a request."""
    engine_running: float
    """Mean number of its requests, waiting ones too."""
    failures: int
    verdicts: dict[str, int]
    """Sessions by verdict, evaluations too (`not_for_training`)."""
    seconds: dict[str, float]
    """Of everything around the run."""
    load: float
    """Load average of the machine at the end."""
    curve: list[tuple[int, float, float]]
    """Episodes, seconds, and the mean reward of the last episodes."""

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trains - self.publishes


class Shelf:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def results(self) -> list[Result]:
        """All that are there, in the order of their trials. Raises SystemExit for a file that is none."""
        found = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda result: msgspec.structs.astuple(result.trial))

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        return [trial for trial in trials if not self._path(trial).exists()]

    def put(self, result: Result) -> None:
        """Beside its place first: a file of that name is a whole result."""
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
            raise SystemExit(f"{path} is no result: {error}; delete it, and its run is made again") from None


def run_missing(shelf: Shelf, trials: Sequence[Trial], run: Callable[[Trial], Result]) -> int:
    """Make the runs that are missing, one after the other. How many failed; the others' results are kept."""
    missing, failed = shelf.missing(trials), 0
    print(f"{len(trials) - len(missing)} of {len(trials)} runs are done already", file=sys.stderr)
    for trial in missing:
        print(f"{trial.name} begins", file=sys.stderr, flush=True)
        try:
            result = run(trial)
        except StackError as error:
            failed += 1
            print(f"{trial.name} failed: {error}", file=sys.stderr, flush=True)
            continue
        shelf.put(result)
        print(f"{trial.name}: {result.ended}", file=sys.stderr, flush=True)
    return failed
