"""The queue of jobs while what it needs is away: jobs wait for the gateway."""

from pathlib import Path

from fine_tuning.jobs.job import FineTuningJob
from fine_tuning.jobs.store import JobStore
from fine_tuning.settings import FineTuningLimits
from tests.support.environments.running import running_gateway
from tests.support.fine_tuning.running import EQUAL, fine_tuning, jsonl, sums
from tests.support.serving import free_port
from tests.support.waiting import wait_until


def job(number: int) -> FineTuningJob:
    request = {
        "model": "policy",
        "training_file": "file-1",
        "method": {"type": "reinforcement", "reinforcement": {"grader": EQUAL}},
    }
    return FineTuningJob(
        id=f"ftjob-{number}", number=number, created_at=0, request=request, model="policy", seed=0
    )


def left_queued(directory: Path, count: int) -> list[FineTuningJob]:
    """Jobs that an earlier service has left."""
    store = JobStore(directory / "jobs", FineTuningLimits())
    jobs = [store.put(job(number)) for number in range(1, count + 1)]
    for each in jobs:
        (store.path(each) / "training.jsonl").write_bytes(jsonl(sums(2)))
    return jobs


def test_jobs_wait_for_a_gateway_that_is_away_when_they_begin(
    redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    first, second = left_queued(tmp_path / "left", 2)
    port = free_port()
    with fine_tuning(tmp_path / "left", f"http://127.0.0.1:{port}") as service:
        wait_until(lambda: len(service.messages(first.id)) > 0)
        (told,) = service.messages(first.id)
        assert told.startswith("The job waits for the gateway: ")
        with running_gateway(redis_url, tiny_model, tmp_path, port):
            assert [service.ended(each.id).status for each in (first, second)] == ["succeeded"] * 2


def test_a_job_fails_when_the_gateway_is_away_for_too_long(tmp_path: Path) -> None:
    (left,) = left_queued(tmp_path / "left", 1)
    url = f"http://127.0.0.1:{free_port()}"
    with fine_tuning(tmp_path / "left", url, gateway_wait_s=0.05) as service:
        ended = service.ended(left.id)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "gateway_unavailable")
