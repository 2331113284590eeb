"""Jobs in a directory, each in one of its own.

{id}/job.json           written anew at each change
{id}/events.jsonl       one line for each event
{id}/checkpoints.jsonl  one line for each version
{id}/training.jsonl, validation.jsonl, run/, evals/
"""

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from fine_tuning.errors import BadInput
from fine_tuning.jobs.job import FineTuningJob, JobCheckpoint, JobEvent
from fine_tuning.settings import FineTuningLimits
from fine_tuning.whole_file import write_whole

logger = logging.getLogger(__name__)

T = TypeVar("T", JobEvent, JobCheckpoint)


class JobStore:
    """The jobs of one service, in the order of their creation."""

    def __init__(self, directory: Path, limits: FineTuningLimits) -> None:
        self._directory, self._limits = directory, limits
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob("*"):
            if left.is_dir() and not (left / "job.json").exists():  # a killed creation
                shutil.rmtree(left, ignore_errors=True)
        read = [job for path in sorted(directory.glob("*/job.json")) if (job := _job_in(path)) is not None]
        self._jobs = {each.id: each for each in sorted(read, key=lambda each: each.number)}
        self._lines: dict[Path, int] = {}

    @property
    def newest_first(self) -> list[FineTuningJob]:
        return list(reversed(self._jobs.values()))

    @property
    def oldest_first(self) -> list[FineTuningJob]:
        return list(self._jobs.values())

    @property
    def next_number(self) -> int:
        return max((each.number for each in self._jobs.values()), default=0) + 1

    def get(self, job_id: str) -> FineTuningJob:
        """Raises BadInput (404)."""
        if job_id not in self._jobs:
            raise BadInput(f"there is no fine-tuning job {job_id[:100]!r}", status=404)
        return self._jobs[job_id]

    def find(self, job_id: str) -> FineTuningJob | None:
        """The job, unless it was removed to make room."""
        return self._jobs.get(job_id)

    def path(self, job: FineTuningJob) -> Path:
        return self._directory / job.id

    def check_room(self) -> None:
        """Raises BadInput if no further job can be kept."""
        if len(self._jobs) >= self._limits.jobs and not any(each.ended for each in self._jobs.values()):
            raise BadInput(f"{len(self._jobs)} jobs wait or run", status=429)

    def add(self, job: FineTuningJob) -> None:
        """Keep a new job, in place of the oldest one that has ended if there are too many."""
        self.put(job)
        ended = [each for each in self._jobs.values() if each.ended]
        while len(self._jobs) > self._limits.jobs and ended:
            oldest = ended.pop(0)
            del self._jobs[oldest.id]
            shutil.rmtree(self.path(oldest), ignore_errors=True)

    def put(self, job: FineTuningJob) -> FineTuningJob:
        """Keep a changed job."""
        directory = self.path(job)
        directory.mkdir(exist_ok=True)
        write_whole(directory / "job.json", msgspec.json.encode(job))
        self._jobs[job.id] = job
        return job

    def tell(self, job: FineTuningJob, event: JobEvent) -> None:
        """Keep an event."""
        path = self.path(job) / "events.jsonl"
        count = self._lines.get(path, -1)
        count = len(_lines(path, JobEvent)) if count < 0 else count
        if count >= 2 * self._limits.events:  # the newest ones are kept
            kept = _lines(path, JobEvent)[-self._limits.events :]
            write_whole(path, b"".join(msgspec.json.encode(each) + b"\n" for each in kept))
            count = len(kept)
        _append(path, event)
        self._lines[path] = count + 1

    def checkpoint(self, job: FineTuningJob, checkpoint: JobCheckpoint) -> None:
        _append(self.path(job) / "checkpoints.jsonl", checkpoint)

    def events(self, job: FineTuningJob) -> list[JobEvent]:
        """The newest first."""
        return _lines(self.path(job) / "events.jsonl", JobEvent)[: -self._limits.events - 1 : -1]

    def checkpoints(self, job: FineTuningJob) -> list[JobCheckpoint]:
        """The newest first."""
        return _lines(self.path(job) / "checkpoints.jsonl", JobCheckpoint)[::-1]


def _job_in(path: Path) -> FineTuningJob | None:
    """The job; None if the file cannot be read. The service does its other jobs without it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FineTuningJob)
    except (msgspec.DecodeError, OSError) as error:
        logger.error("%s is no job, and is left alone: %s", path, error)
        return None


def _append(path: Path, value: JobEvent | JobCheckpoint) -> None:
    """A kill may have cut the last line: then this one begins a new line."""
    with path.open("ab+") as file:
        if file.tell() and file.seek(-1, 2) is not None and file.read(1) != b"\n":
            file.write(b"\n")
        file.write(msgspec.json.encode(value) + b"\n")


def _lines(path: Path, kind: type[T]) -> list[T]:
    return list(_whole(path.read_bytes().splitlines(), kind)) if path.exists() else []


def _whole(lines: Iterable[bytes], kind: type[T]) -> Iterable[T]:
    decoder = msgspec.json.Decoder(kind)
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:  # cut by a kill
            continue
