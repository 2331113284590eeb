"""The queue of jobs while what it needs is away: jobs wait for the gateway, and for room on the disk."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from fine_tuning.job_queue import JobQueue
from fine_tuning.jobs import FineTuningJob, JobStore
from fine_tuning.served_versions import PolicyWatch
from fine_tuning.settings import FineTuningLimits
from tests.support.environments.running import running_gateway
from tests.support.fine_tuning.left_jobs import job_of, left_queued
from tests.support.fine_tuning.running import fine_tuning
from tests.support.serving import free_port
from tests.support.waiting import wait_until, wait_until_async


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


class ShortStore(JobStore):
    """A store whose next `faults` changes fail."""

    def __init__(self, directory: Path, faults: list[Exception]) -> None:
        super().__init__(directory, FineTuningLimits())
        self.faults = faults

    def put(self, job: FineTuningJob) -> FineTuningJob:
        if self.faults:
            raise self.faults.pop(0)
        return super().put(job)


@asynccontextmanager
async def running_queue(
    store: JobStore, train: Callable[[FineTuningJob], Awaitable[str]]
) -> AsyncIterator[JobQueue]:
    """A queue whose jobs have begun, so that no gateway is asked."""
    for each in store.oldest_first:
        JobStore.put(store, msgspec.structs.replace(each, first_version=1))
    async with httpx.AsyncClient(timeout=120) as client:
        queue = JobQueue(store, train, PolicyWatch(client), waits_s=1.0)
        running = asyncio.create_task(queue.run())
        yield queue
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def trained(job: FineTuningJob) -> str:
    return "policy@1"


@pytest.mark.parametrize("faults", [1, 4])
async def test_a_full_disk_ends_no_job_and_not_the_queue(tmp_path: Path, faults: int) -> None:
    left_queued(tmp_path, 2)
    store = ShortStore(tmp_path / "jobs", [OSError(errno.ENOSPC, "no space left") for _ in range(faults)])
    async with running_queue(store, trained) as queue:
        assert "no space left" in await wait_until_async(lambda: queue.fault or "")
        await wait_until_async(lambda: all(each.ended for each in store.oldest_first))
        await wait_until_async(lambda: queue.fault is None)
    assert [each.status for each in store.oldest_first] == ["succeeded", "succeeded"]


async def test_a_fault_of_one_job_that_cannot_be_stored_does_not_end_the_queue(tmp_path: Path) -> None:
    left_queued(tmp_path, 2)
    store = ShortStore(tmp_path / "jobs", [])

    async def train(job: FineTuningJob) -> str:
        if job.number == 1:
            store.faults = [OSError(errno.EIO, "the disk is broken")]
            raise RuntimeError("a bug")
        return "policy@1"

    async with running_queue(store, train) as queue:
        assert "the disk is broken" in await wait_until_async(lambda: queue.fault or "")


async def test_a_job_that_was_cancelled_and_removed_meanwhile_does_not_end_the_queue(tmp_path: Path) -> None:
    first, _ = left_queued(tmp_path, 2)
    store = JobStore(tmp_path / "jobs", FineTuningLimits(jobs=2))

    async def train(job: FineTuningJob) -> str:
        if job.id == first.id:
            queue.cancel(first.id)
            store.add(msgspec.structs.replace(job_of(3), first_version=1))
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("its sessions could not be ended")
        return "policy@1"

    async with running_queue(store, train) as queue:
        await wait_until_async(lambda: all(each.ended for each in store.oldest_first))
    assert [(each.number, each.status) for each in store.oldest_first] == [(2, "succeeded"), (3, "succeeded")]
