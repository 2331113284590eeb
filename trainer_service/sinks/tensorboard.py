"""Writes event files for TensorBoard.

tensorboardX's SummaryWriter sends events to a thread through a queue of ten. A full disk ends that thread,
and the eleventh event waits for ever. So this sink writes each point on the caller's thread, and an error
reaches the caller.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from rollout_queue import clock
from trainer_service.sinks.sink import PointKind

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
