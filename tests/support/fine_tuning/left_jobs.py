"""Jobs that a service finds when it starts."""

from pathlib import Path
from typing import Any

from fine_tuning.jobs import FineTuningJob, JobStore
from fine_tuning.settings import FineTuningLimits
from tests.support.fine_tuning.running import jsonl, sums
from tests.support.reward_service.graders import CHECK


def job_of(number: int, **more: Any) -> FineTuningJob:
    """A job that waits for its turn; `more` are fields of its request."""
    request = {
        "model": "policy",
        "training_file": "file-1",
        "method": {"type": "reinforcement", "reinforcement": {"grader": CHECK}},
        **more,
    }
    return FineTuningJob(
        id=f"ftjob-{number}", number=number, created_at=0, request=request, model="policy", seed=0
    )


def left_queued(directory: Path, count: int, **more: Any) -> list[FineTuningJob]:
    """Jobs that an earlier service has left."""
    store = JobStore(directory / "jobs", FineTuningLimits())
    jobs = [store.put(job_of(number, **more)) for number in range(1, count + 1)]
    for each in jobs:
        (store.path(each) / "training.jsonl").write_bytes(jsonl(sums(2)))
    return jobs
