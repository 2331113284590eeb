"""Writes metrics for the tools that store or draw them: JSON lines, TensorBoard, Weights & Biases.

A step is a line of a file, an evaluation one of a second file. The package of Weights & Biases is imported
only if the settings ask for it. tensorboardX's SummaryWriter sends events to a thread through a queue of ten.
A full disk ends that thread, and the eleventh event waits for ever. So TensorBoard's sink writes each point
on the caller's thread, and an error reaches the caller.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from rollout_queue import clock
from trainer_service.settings import TrainerSettings, WandbSettings

logger = logging.getLogger(__name__)

PointKind = Literal["step", "evaluation"]
"""A point of a step has all metrics of the step. A point of an evaluation has the score of a version, and
lies at the step that made the version."""


class Sink(Protocol):
    """Writes points. The exceptions that it raises are counted and logged, and the training goes on."""

    name: str

    def resume(self, step: int) -> None:
        """Continue after `step`. Points of later steps that an earlier process wrote no longer count. A sink
        that may have lost points up to `step` writes them again."""

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Write one point. `step` is its place on the x axis, `time` is in seconds since 1970. If a step is
        repeated, its later point counts."""

    def close(self) -> None: ...


PART_BYTES = 16 * 2**20
"""How much of the end of a file is read. Steps that no checkpoint has are at its end."""
AGAIN_BYTES = 2**18
"""How much a sink that has lost points gets again. W&B holds 32 KiB in memory."""
EVALUATIONS = ".eval"
"""What the name of the second file has before its suffix."""


class JsonLines:
    """Appends lines, which other processes may read at once. A step that is repeated after a restart has a
    second line. If a step, or a version in the second file, has several lines, the last one counts."""

    name = "jsonl"

    def __init__(self, path: Path) -> None:
        self._paths = _paths(path)
        path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None: ...

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Numbers that are not finite are written as null. Raises OSError."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        _append(self._paths[kind], json.dumps(finite).encode() + b"\n")

    def close(self) -> None: ...


def last_points(path: Path, step: int) -> Iterator[tuple[PointKind, Mapping[str, float]]]:
    """The last points up to `step` that `JsonLines` has written in this file and beside it, in their order:
    about AGAIN_BYTES of each kind. Numbers that were not finite are left out. Raises OSError."""
    for kind, file in _paths(path).items():
        lines, size = list[dict[str, float]](), 0
        for line in reversed(_last_lines(file)):
            try:
                point = json.loads(line)
            except ValueError:  # the first line of the part, or half a line, which a full disk has left
                continue
            if point["step"] <= step:
                lines.append({name: value for name, value in point.items() if value is not None})
                size += len(line)
            if size > AGAIN_BYTES:
                break
        yield from ((kind, point) for point in reversed(lines))


def _paths(path: Path) -> Mapping[PointKind, Path]:
    return {"step": path, "evaluation": path.with_suffix(f"{EVALUATIONS}{path.suffix}")}


def _last_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - PART_BYTES))
        return file.read(PART_BYTES).splitlines()


def _append(path: Path, line: bytes) -> None:
    """Write the whole line or nothing: after half a line, the next one is unreadable. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise


PLACE = ("step", "time")


class TensorBoard:
    """Writes one file per process, and a new file after a failed write. The first file begins with a start
    event. From the step of this event on, TensorBoard drops the points of earlier files. So steps that a
    restarted trainer repeats replace those of the process that crashed."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._void_from: int | None = 1
        """The step of the start event with which the next file begins; None if a file has it already."""
        self._writer: EventsWriter | None = None
        self._path = directory
        self._whole_bytes = 0

    def resume(self, step: int) -> None:
        self._void_from = step + 1

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        """Raises OSError. The file then ends after its last whole point, and the next point begins a new
        file."""
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in values.items() if name not in PLACE
        ]
        point = Event(step=int(values["step"]), wall_time=values["time"], summary=Summary(value=scalars))
        try:
            writer = self._writer or self._open(values["time"])
            writer.write_event(point)
            writer.flush()
            self._whole_bytes = self._path.stat().st_size
            self._void_from = None
        except OSError:
            self._give_up()
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, now: float) -> EventsWriter:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._whole_bytes = 0
        self._writer = EventsWriter(str(self._directory / "events"), f".{int(1e9 * clock.now())}")
        self._path = Path(self._writer._file_name)
        if self._void_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=self._void_from, wall_time=now, session_log=start))
        return self._writer

    def _give_up(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # the writer's buffer cannot be written either
                self._writer.close()
            with suppress(OSError):
                os.truncate(self._path, self._whole_bytes)
            self._writer = None


AWAY_S = 30.0
"""How long the start waits for W&B. After that, the run is written to this machine's disk."""
FINISH_S = 10.0
"""How long the end of a run waits until everything is sent; `wandb sync` sends the rest."""


class WeightsAndBiases:
    """Makes the metric `step` the x axis of every curve. W&B's own counter never goes back, but a restarted
    trainer repeats steps, and an evaluation belongs to the earlier step that made its version."""

    name = "wandb"

    def __init__(
        self, settings: WandbSettings, algorithm: Mapping[str, Any], metrics_path: Path | None
    ) -> None:
        """`metrics_path` is the file of `JsonLines`, which has every point.

        Raises SystemExit if the package or the key is missing, or W&B refuses the run. If W&B cannot be
        reached, the run is offline."""
        try:
            import wandb
        except ImportError as error:
            raise SystemExit(
                "trainer.wandb is set, but the package wandb is not installed: pip install 'weir-rl[wandb]'"
            ) from error
        self._metrics_path = metrics_path
        settings.dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = _start_run(settings, settings.mode, algorithm)
        except wandb.errors.AuthenticationError as error:
            raise SystemExit(f"trainer.wandb: {error}") from error
        except wandb.errors.CommError as error:
            logger.warning(
                "W&B cannot be reached; this run is written to %s for `wandb sync`: %s", settings.dir, error
            )
            self._run = _start_run(settings, "offline", algorithm)
        except wandb.Error as error:
            raise SystemExit(
                f"trainer.wandb: cannot start a run in project {settings.project}: {error}"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def resume(self, step: int) -> None:
        """Write the last points up to `step` again: W&B held some of them in memory, which a process that is
        killed loses."""
        for kind, values in last_points(self._metrics_path, step) if self._metrics_path is not None else ():
            self.write(kind, values)

    def write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        self._run.finish()


def _start_run(
    settings: WandbSettings, mode: Literal["online", "offline"], algorithm: Mapping[str, Any]
) -> Any:
    import wandb

    quiet = wandb.Settings(  # nothing about the machine or its files is sent
        console="off",
        disable_code=True,
        disable_git=True,
        finish_timeout=FINISH_S,
        init_timeout=AWAY_S,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return wandb.init(
        project=settings.project,
        name=settings.name,
        entity=settings.entity,
        group=settings.group or settings.name,
        id=settings.id,
        resume=None if settings.id is None else "allow",
        tags=settings.tags,
        mode=mode,
        config={"algorithm": dict(algorithm)},
        dir=settings.dir,
        settings=quiet,
    )


def chosen_sinks(settings: TrainerSettings) -> list[Sink]:
    """Raises SystemExit with the reason if the run at Weights & Biases cannot be started."""
    sinks: list[Sink] = []
    if settings.metrics_path is not None:
        sinks.append(JsonLines(settings.metrics_path))
    if settings.tensorboard_dir is not None:
        sinks.append(TensorBoard(settings.tensorboard_dir))
    if settings.wandb is not None:
        algorithm = settings.algorithm.model_dump(mode="json")
        sinks.append(WeightsAndBiases(settings.wandb, algorithm, settings.metrics_path))
    return sinks
