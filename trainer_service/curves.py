"""The curves of a run, from the file of JSON lines: each metric in at most so many buckets of steps; and the
runs whose metrics are kept beside those of this one, in the folder of `metrics_path` and in its folders.

metrics.jsonl ──new lines──▶ columns of the metrics that were asked for ──▶ buckets with min, mean and max

The file may have hundreds of megabytes. A request reads a part of it at most, and keeps what it has found:
so the first request may have to be repeated, and later ones read only what was appended. A run is named by
its file's place, such as `before.jsonl` or `demo/metrics.jsonl`. The name is looked up among the files that
are found, so no path is made of what a request names.
"""

import re
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from trainer_service.settings import GuardSettings
from trainer_service.sinks import EVALUATIONS


class MetricLimit(msgspec.Struct, frozen=True):
    """What a guard allows for one metric. `most` and `least` are null if the limit is no fixed number."""

    metric: str
    guard: str
    """The setting of `trainer.guards` that sets the limit."""
    says: str
    most: float | None = None
    least: float | None = None


def limits_of(guards: GuardSettings) -> list[MetricLimit]:
    """The limits of the guards that are on."""
    limits = []
    if (most := guards.max_abs_logp) is not None:
        limits.append(MetricLimit("mismatch/abs_logp_current", "max_abs_logp", f"at most {most:g}", most))
    if (most := guards.max_kl) is not None:
        limits.append(
            MetricLimit("mismatch/kl_current", "max_kl", f"between {-most:g} and {most:g}", most, -most)
        )
    if (ratio := guards.max_grad_norm_ratio) is not None:
        says = f"at most {ratio:g} times its median over the last 100 steps, where less than 1 counts as 1"
        limits.append(MetricLimit("grad_norm", "max_grad_norm_ratio", says))
    if (drop := guards.reward_drop) is not None:
        groups = f"{guards.reward_groups} groups of a task"
        says = f"the mean over {groups} may not fall by {drop:.0%} of the best such mean"
        limits.append(MetricLimit("reward_mean", "reward_drop", says))
    return limits


PART_BYTES = 128 * 2**20
"""How much of the file one request reads at most: about a second."""
BLOCK_BYTES = 4 * 2**20
MOST_POINTS = 4_000_000
"""Points of all columns that are kept: 32 MB. Beyond them, the columns that were used least recently go."""

MOST_COLUMNS = 256
"""The same for their number: a name that no line has takes memory, too."""
IN_NO_NAME = re.compile(r'["\\\x00-\x1f]')
"""Characters that no name of a metric contains, because JSON escapes them."""

TASK_METRICS = re.compile(rb'"(reward/task/[^"\\\\]{1,100})"')
MOST_TASKS = 64
"""The tasks that are told, those that came last."""
MOST_RESTARTS = 64
STEP = "step"
UPTIME = "seconds/uptime"
"""Less than in the step before: the trainer has restarted."""
VERSION = "version"
"""Every step has this metric, so its steps are those of the run."""


class Series(msgspec.Struct, frozen=True):
    """One metric: for each bucket with a value its first step, and the values' minimum, mean and maximum."""

    steps: list[int]
    min: list[float]
    mean: list[float]
    max: list[float]


class CurvesReply(msgspec.Struct, frozen=True):
    """What `GET /learning` answers."""

    metrics: list[str]
    """The names of all metrics of the last step."""
    series: dict[str, Series]
    first: int | None
    """The first and the last step of the run, as far as the file was read."""
    last: int | None
    bucket_steps: int
    """How many steps a bucket has."""
    limits: list[MetricLimit]
    complete: bool
    """False if the file has more lines, which the next request reads."""
    tasks: list[str] = []
    """The metrics of tasks, those that came last at the end."""
    restarts: list[int] = []
    """The last steps before the trainer restarted."""


class Column:
    """The points of one metric, by step, and how far in the file they were read."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("f")
        self.offset = 0

    def add(self, step: int, value: float) -> None:
        """A step that is repeated after a restart takes the place of the former one and all after it."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


class StepWindow(NamedTuple):
    """The steps [first, last] in buckets of `width` steps."""

    first: int
    last: int
    width: int


class Curves:
    """Reads the file of one run. Threads may share it."""

    def __init__(self, path: Path | None, limits: Sequence[MetricLimit] = ()) -> None:
        self.path, self._limits = path, list(limits)
        self._columns: OrderedDict[str, Column] = OrderedDict()
        self._names: list[str] = []
        self._tasks: dict[str, None] = {}
        self._lock = Lock()

    def read(self, metrics: Sequence[str], first: int | None, last: int | None, buckets: int) -> CurvesReply:
        """The metrics between two steps, in at most `buckets` buckets. No name has a character of
        `IN_NO_NAME`. Raises OSError."""
        with self._lock:
            always = (VERSION, UPTIME)
            wanted = [*always, *(name for name in dict.fromkeys(metrics) if name not in always)]
            complete = self._read_file(wanted)
            steps = self._columns[VERSION].steps
            window = _window(steps, first, last, buckets)
            series = {name: _series(self._columns[name], window) for name in dict.fromkeys(metrics)}
            self._forget(set(wanted))
            first, last = (steps[0], steps[-1]) if steps else (None, None)
            restarts = _restarts(self._columns[UPTIME])
            ends = (self._limits, complete, list(self._tasks)[-MOST_TASKS:], restarts)
            return CurvesReply(self._names, series, first, last, window.width, *ends)

    def _read_file(self, names: Sequence[str]) -> bool:
        """Read the lines that these columns lack. Returns whether they are all read."""
        size = self.path.stat().st_size if self.path is not None and self.path.exists() else 0
        if any(column.offset > size for column in self._columns.values()):  # another file by now
            self._columns.clear()
            self._tasks.clear()
        for name in names:
            self._columns.setdefault(name, Column())
            self._columns.move_to_end(name)
        left, complete = PART_BYTES, True
        for offset in sorted({self._columns[name].offset for name in names}):
            behind = [name for name in names if self._columns[name].offset == offset]
            read = self._read_lines(behind, offset, min(left, size - offset))
            left -= read
            # Half a line may be left, which is shorter than a block.
            complete = complete and size - offset - read < min(BLOCK_BYTES, left)
        return complete

    def _read_lines(self, names: Sequence[str], offset: int, most: int) -> int:
        """Read whole lines, about `most` bytes of them. Returns how many bytes they are."""
        if most <= 0 or self.path is None:
            return 0
        fields = {STEP: "at"} | {name: f"m{at}" for at, name in enumerate(names) if name != STEP}
        line_type = msgspec.defstruct(
            "Line",
            [(field, float | None, None) for field in fields.values()],
            rename={field: name for name, field in fields.items()},
        )
        decoder, done, last = msgspec.json.Decoder(line_type), 0, b""
        columns = [(fields[name], self._columns[name]) for name in names]
        with self.path.open("rb") as file:
            file.seek(offset)
            while done < most and (block := file.read(BLOCK_BYTES)):
                whole = block[: block.rfind(b"\n") + 1]
                if not whole:
                    break
                for line in whole.splitlines():
                    _add(decoder, line, columns)
                    last = line or last
                self._note_tasks(whole)
                done += len(whole)
                file.seek(offset + done)
        for name in names:
            self._columns[name].offset = offset + done
        if last:
            self._names = _names_in(last) or self._names
        return done

    def _note_tasks(self, block: bytes) -> None:
        """A task that comes later is told later."""
        for name in dict.fromkeys(TASK_METRICS.findall(block)):
            found = name.decode(errors="replace")
            self._tasks.pop(found, None)
            self._tasks[found] = None
        while len(self._tasks) > MOST_TASKS:
            self._tasks.pop(next(iter(self._tasks)))

    def _forget(self, used: set[str]) -> None:
        points = sum(len(column.steps) for column in self._columns.values())
        for name in list(self._columns):
            if points <= MOST_POINTS and len(self._columns) <= MOST_COLUMNS:
                return
            if name not in used:
                points -= len(self._columns.pop(name).steps)


def _add(decoder: Any, line: bytes, columns: Sequence[tuple[str, Column]]) -> None:
    try:
        found = decoder.decode(line)
    except msgspec.DecodeError:  # half a line, which a full disk has left
        return
    if found.at is None:
        return
    for field, column in columns:
        value = getattr(found, field)
        if value is not None and isfinite(value):
            column.add(int(found.at), value)


def _restarts(uptimes: Column) -> list[int]:
    """The steps after which the trainer's time began anew."""
    before = pairwise(zip(uptimes.steps, uptimes.values, strict=True))
    return [step for (step, seconds), (_, later) in before if later < seconds][-MOST_RESTARTS:]


def _names_in(line: bytes) -> list[str]:
    try:
        return sorted(msgspec.json.decode(line, type=dict[str, float | None]))
    except msgspec.DecodeError:
        return []


def _window(steps: Sequence[int], first: int | None, last: int | None, buckets: int) -> StepWindow:
    low = max(steps[0] if steps else 0, first or 0)
    high = min(steps[-1] if steps else 0, last if last is not None else steps[-1] if steps else 0)
    return StepWindow(low, high, max(1, -(-(high - low + 1) // buckets)))


def _series(column: Column, window: StepWindow) -> Series:
    series = Series([], [], [], [])
    begin = bisect_left(column.steps, window.first)
    for first in range(window.first, window.last + 1, window.width):
        end = bisect_left(column.steps, min(first + window.width, window.last + 1), begin)
        if values := column.values[begin:end]:
            series.steps.append(first)
            series.min.append(min(values))
            series.mean.append(sum(values) / len(values))
            series.max.append(max(values))
        begin = end
    return series


MOST_RUNS = 100
"""The runs that are listed, those that changed last."""
MOST_ENTRIES = 2000
"""So many entries of folders are looked at."""
MOST_OPEN = 3
"""The runs whose points are kept in memory."""


class KeptRun(msgspec.Struct, frozen=True):
    """One file of metrics."""

    name: str
    size_bytes: int
    changed_at: float
    """Seconds since 1970."""


class KeptRuns:
    """Finds and reads the runs that are kept beside this one. Threads may share it."""

    def __init__(self, path: Path | None) -> None:
        """`path` is the file of this run, which is not among them."""
        self._path = path
        self._open: OrderedDict[str, Curves] = OrderedDict()
        self._lock = Lock()

    def listed(self) -> Sequence[KeptRun]:
        """The runs, the newest first."""
        found = [KeptRun(name, *_facts(path)) for name, path in self._files()]
        return sorted(found, key=lambda each: -each.changed_at)[:MOST_RUNS]

    def curves(self, name: str) -> Curves | None:
        """Those of the run of this name; None if there is none."""
        path = next((path for known, path in self._files() if known == name), None)
        if path is None:
            return None
        with self._lock:
            curves = self._open.pop(name, None) or Curves(path)
            self._open[name] = curves
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return curves

    def _files(self) -> Iterator[tuple[str, Path]]:
        if self._path is None:
            return
        root, looked = self._path.parent, 0
        folders = [root]
        while folders and looked < MOST_ENTRIES:
            folder = folders.pop(0)
            with suppress(OSError):  # another process may remove it meanwhile
                for each in sorted(folder.iterdir()):
                    looked += 1
                    if each.is_symlink() or looked > MOST_ENTRIES:
                        continue
                    if each.is_dir() and folder == root:
                        folders.append(each)
                    elif each.suffix == ".jsonl" and each != self._path and self._is_run(each):
                        name = str(each.relative_to(root))
                        if name.isprintable():
                            yield name, each

    def _is_run(self, path: Path) -> bool:
        """Whether the file begins with the metrics of a step."""
        if path.stem.endswith(EVALUATIONS):
            return False
        with suppress(OSError), path.open("rb") as file:
            return file.read(1).startswith(b"{") and b'"step"' in file.read(4096)
        return False


def _facts(path: Path) -> tuple[int, float]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime
