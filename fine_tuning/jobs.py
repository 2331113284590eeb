"""Jobs: what one may ask for, as it is stored and as OpenAI's clients read it, each in a directory of its
own.

queued ──▶ running ──▶ succeeded │ failed
  ▲          │  ╰────▶ cancelled
  ╰─ paused ◀╯

method.reinforcement ─┬─ grader, response_format
                      └─ hyperparameters: n_epochs, compute_multiplier, eval_interval, eval_samples, …

What Weir cannot do is refused by name.

{id}/job.json           written anew at each change
{id}/events.jsonl       one line for each event
{id}/checkpoints.jsonl  one line for each version
{id}/training.jsonl, validation.jsonl, run/, evals/
"""

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter

from fine_tuning.errors import BadInput
from fine_tuning.settings import FineTuningLimits
from fine_tuning.training_files import write_whole
from reward_service.graders.grader_objects import AnyGrader, BodyPart
from rollout_queue import clock
from rollout_queue.contract.ids import new_id

WRITTEN: TypeAdapter[Any] = TypeAdapter(Any)
MAX_EPOCHS = 1000
MAX_MULTIPLIER = 128.0
MAX_METADATA = 16
Auto = Literal["auto"]


def _refused(reason: str) -> AfterValidator:
    """Refuses all values but those that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in (None, "auto", []):
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def _storable(value: Any) -> Any:
    """Refuses JSON that no file can hold, or that is nested too deeply to be written again."""
    try:
        json.dumps(value, allow_nan=False)
        WRITTEN.dump_json(value)
    except (ValueError, RecursionError) as error:
        why = "it has NaN, Infinity or half of a surrogate pair, or is nested too deeply"
        raise ValueError(why) from error
    return value


class ReinforcementSettings(BodyPart):
    """`hyperparameters` of the method."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=MAX_EPOCHS)] = "auto"
    """How often each row is played; auto is once."""
    compute_multiplier: Auto | Annotated[float, Field(gt=0, le=MAX_MULTIPLIER)] = "auto"
    """Answers to each row, as a multiple of `fine_tuning.group_size`."""
    eval_interval: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Versions between two evaluations; auto is 10."""
    eval_samples: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Answers to each row of the validation file in an evaluation; auto is 1."""
    reasoning_effort: Literal["default", "low", "medium", "high"] = "default"
    batch_size: Annotated[
        Any, _refused("the trainer makes its batches by trainer.algorithm, not by job: leave it out")
    ] = "auto"
    learning_rate_multiplier: Annotated[
        Any, _refused("the trainer has its rate from trainer.optimizer, not by job: leave it out")
    ] = "auto"

    @property
    def epochs(self) -> int:
        return 1 if self.n_epochs == "auto" else self.n_epochs

    @property
    def steps_between_evals(self) -> int:
        return 10 if self.eval_interval == "auto" else self.eval_interval

    @property
    def samples(self) -> int:
        return 1 if self.eval_samples == "auto" else self.eval_samples

    @property
    def for_evaluations(self) -> list[str]:
        """The fields that were given, and need a validation file."""
        return [name for name in ("eval_interval", "eval_samples") if getattr(self, name) != "auto"]

    def answers(self, group_size: int) -> int:
        """Answers to one row that are compared: at least two."""
        factor = 1.0 if self.compute_multiplier == "auto" else self.compute_multiplier
        return min(1024, max(2, round(group_size * factor)))


class ReinforcementMethod(BodyPart):
    grader: AnyGrader
    response_format: Annotated[dict[str, Any] | None, AfterValidator(_storable)] = None
    """Of every answer, as in chat completions."""
    hyperparameters: ReinforcementSettings = ReinforcementSettings()


class JobMethod(BodyPart):
    type: Literal["reinforcement"]
    reinforcement: ReinforcementMethod


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class JobRequest(BodyPart):
    """The body."""

    model: str = Field(min_length=1, max_length=200)
    training_file: str = Field(max_length=200)
    validation_file: str | None = Field(None, max_length=200)
    method: JobMethod
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    suffix: Annotated[
        Any, _refused("a fine-tuned model is a version of the policy, and has its name: leave it out")
    ] = None
    integrations: Annotated[Any, _refused("the trainer logs by trainer.wandb, not by job: leave it out")] = (
        None
    )
    hyperparameters: Annotated[
        Any, _refused("give method.reinforcement.hyperparameters: these are of supervised jobs")
    ] = None


JobStatus = Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
EventLevel = Literal["info", "warn", "error"]
ENDED = ("succeeded", "failed", "cancelled")


class JobFault(msgspec.Struct, frozen=True):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class FineTuningJob(msgspec.Struct, frozen=True, kw_only=True):
    """`number` orders jobs. `request` is the body that made it; `first_version` is what the gateway served
    when it began."""

    id: str
    number: int
    created_at: int
    request: dict[str, Any]
    model: str
    seed: int
    status: JobStatus = "queued"
    first_version: int | None = None
    fine_tuned_model: str | None = None
    finished_at: int | None = None
    error: JobFault | None = None

    @property
    def asked(self) -> JobRequest:
        return JobRequest.model_validate(self.request)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def shown(self) -> dict[str, Any]:
        """OpenAI's `fine_tuning.job`."""
        return {
            "id": self.id,
            "object": "fine_tuning.job",
            "created_at": self.created_at,
            "error": None if self.error is None else msgspec.to_builtins(self.error),
            "estimated_finish": None,
            "fine_tuned_model": self.fine_tuned_model,
            "finished_at": self.finished_at,
            "hyperparameters": {},
            "integrations": [],
            "metadata": self.request.get("metadata"),
            "method": self.request["method"],
            "model": self.model,
            "organization_id": "weir",
            "result_files": [],
            "seed": self.seed,
            "status": self.status,
            "trained_tokens": None,
            "training_file": self.request["training_file"],
            "validation_file": self.request.get("validation_file"),
        }


class JobEvent(msgspec.Struct, frozen=True):
    """OpenAI's `fine_tuning.job.event`."""

    id: str
    created_at: int
    level: EventLevel
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] = {}
    object: str = "fine_tuning.job.event"

    @classmethod
    def of(
        cls, message: str, level: EventLevel = "info", metrics: dict[str, Any] | None = None
    ) -> "JobEvent":
        kind: Literal["message", "metrics"] = "metrics" if metrics else "message"
        return cls(f"ftevent-{new_id()}", int(clock.now()), level, message, kind, metrics or {})


class JobCheckpoint(msgspec.Struct, frozen=True):
    """OpenAI's `fine_tuning.job.checkpoint`: a policy version that was published while the job ran."""

    id: str
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]
    version: int
    object: str = "fine_tuning.job.checkpoint"


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
