"""A job, its events and its checkpoints, as they are stored and as OpenAI's clients read them.

queued ──▶ running ──▶ succeeded │ failed
  ▲          │  ╰────▶ cancelled
  ╰─ paused ◀╯
"""

from typing import Any, Literal

import msgspec

from fine_tuning.jobs.request import JobRequest
from rollout_queue import clock
from rollout_queue.contract.ids import new_id

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
