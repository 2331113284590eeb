"""Which job trains: the deployment has one policy, so one at a time, the oldest first.

`running` is stored before a job begins, so a service that was killed goes on with it.
"""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable

import msgspec

from environments.errors import GatewayFault, RunStopped, UnknownEnvironment
from environments.session_client import pause_after
from fine_tuning.errors import BadInput, BadRow
from fine_tuning.jobs import FineTuningJob, JobEvent, JobFault, JobStatus, JobStore
from fine_tuning.served_versions import GatewaySilent, PolicyWatch, answered
from rollout_queue import clock

logger = logging.getLogger(__name__)

Train = Callable[[FineTuningJob], Awaitable[str]]
"""Trains a job to its end; returns the name of the model."""
FAULTS: dict[type[Exception], str] = {
    GatewayFault: "gateway_unavailable",
    GatewaySilent: "gateway_unavailable",
    RunStopped: "episodes_failed",
    UnknownEnvironment: "invalid_job",
    BadRow: "invalid_file",
}

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class JobQueue:
    """Runs jobs until it is cancelled; pauses, resumes and cancels them."""

    def __init__(self, store: JobStore, train: Train, policy: PolicyWatch, waits_s: float) -> None:
        """`waits_s` is how long a job waits for a gateway that is away when it begins."""
        self._store, self._train, self._policy, self._waits_s = store, train, policy, waits_s
        self._changed = asyncio.Event()
        self._current: tuple[str, asyncio.Task[str]] | None = None
        self.fault: str | None = None
        """Why the job that is next cannot be run or stored; None if nothing is known to be wrong."""

    @property
    def running(self) -> int:
        return int(self._current is not None)

    def add(self, job: FineTuningJob) -> None:
        self._store.add(job)
        self._store.tell(job, JobEvent.of(f"Created fine-tuning job: {job.id}"))
        self._changed.set()

    def cancel(self, job_id: str) -> FineTuningJob:
        """Raises BadInput."""
        return self._stop(job_id, ("queued", "running", "paused"), "cancelled")

    def pause(self, job_id: str) -> FineTuningJob:
        """Raises BadInput. Another job may train meanwhile."""
        return self._stop(job_id, ("queued", "running"), "paused")

    def resume(self, job_id: str) -> FineTuningJob:
        """Raises BadInput."""
        job = self._in(job_id, ("paused",), "resumed")
        job = self._store.put(msgspec.structs.replace(job, status="queued"))
        self._store.tell(job, JobEvent.of("The job was resumed"))
        self._changed.set()
        return job

    def _stop(self, job_id: str, from_: tuple[JobStatus, ...], to: JobStatus) -> FineTuningJob:
        job = self._in(job_id, from_, to)
        finished_at = int(clock.now()) if to == "cancelled" else None
        job = self._store.put(msgspec.structs.replace(job, status=to, finished_at=finished_at))
        self._store.tell(job, JobEvent.of(f"The job was {to}"))
        if self._current is not None and self._current[0] == job_id:
            self._current[1].cancel()
        return job

    def _in(self, job_id: str, statuses: tuple[JobStatus, ...], wish: str) -> FineTuningJob:
        job = self._store.get(job_id)
        if job.status not in statuses:
            raise BadInput(f"the job is {job.status}: it cannot be {wish}")
        return job

    async def run(self) -> None:
        """Train one job after the other, until cancelled."""
        faults = 0
        while True:
            self._changed.clear()
            if (job := self._next()) is None:
                self.fault = None
                await self._changed.wait()
                continue
            try:
                await self._turn(job)
            except Exception as error:  # a full disk, or a bug, must not end the queue without a word
                logger.exception("job %s: it is tried again", job.id)
                self.fault = f"job {job.id}: {type(error).__name__}: {error}"
                await clock.sleep(pause_after(faults))
                faults += 1
            else:
                self.fault, faults = None, 0

    async def _turn(self, job: FineTuningJob) -> None:
        """Train a job to its end. Raises what cannot be stored: the job is then as it was."""
        task = asyncio.create_task(self._run_one(job))
        self._current = (job.id, task)
        try:
            await asyncio.wait({task})
            if task.cancelled() or (error := task.exception()) is None:
                return
            if isinstance(error, OSError) and error.errno in DISK_IS_FULL:  # no fault of the job
                raise error
            logger.error("job %s failed", job.id, exc_info=error)
            told = f"internal error: {type(error).__name__}: {error}; the log has more"
            self._fail(job.id, "internal_error", told)
        finally:
            if not task.done():  # the service ends: the job goes on when it starts again
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self._current = None

    def _next(self) -> FineTuningJob | None:
        waiting = self._store.oldest_first
        order: tuple[JobStatus, ...] = ("running", "queued")
        return next((job for status in order for job in waiting if job.status == status), None)

    async def _run_one(self, job: FineTuningJob) -> str:
        try:
            job = await self._begun(job)
            name = await self._train(job)
        except tuple(FAULTS) as error:
            code = next(code for kind, code in FAULTS.items() if isinstance(error, kind))
            self._fail(job.id, code, str(error))
            return ""
        kept = self._store.find(job.id)
        if kept is not None and kept.status == "running":
            self._succeed(kept, name)
        return name

    async def _begun(self, job: FineTuningJob) -> FineTuningJob:
        again = job.first_version is not None
        first = job.first_version if again else await self._serving(job)
        job = self._store.put(msgspec.structs.replace(job, status="running", first_version=first))
        told = "The job goes on" if again else f"Fine-tuning job started, at version {first}"
        self._store.tell(job, JobEvent.of(told))
        return job

    async def _serving(self, job: FineTuningJob) -> int:
        """The version that is served. Raises GatewaySilent."""

        def tell(told: str) -> None:
            self._store.tell(job, JobEvent.of(told, "warn"))

        return await answered(self._policy.serving, self._waits_s, tell)

    def _succeed(self, job: FineTuningJob, name: str) -> None:
        if not self._store.checkpoints(job):
            told = "No new version was published: the groups' rewards did not differ, or the trainer waits"
            self._store.tell(job, JobEvent.of(told, "warn"))
        job = self._store.put(
            msgspec.structs.replace(
                job, status="succeeded", fine_tuned_model=name, finished_at=int(clock.now())
            )
        )
        self._store.tell(job, JobEvent.of(f"The job has successfully completed: {name}"))

    def _fail(self, job_id: str, code: str, message: str) -> None:
        job = self._store.find(job_id)
        if job is None or job.status not in ("queued", "running"):  # it was removed, cancelled or paused
            return
        fault = JobFault(code, message[:2000])
        job = self._store.put(
            msgspec.structs.replace(job, status="failed", error=fault, finished_at=int(clock.now()))
        )
        self._store.tell(job, JobEvent.of(f"The job failed: {fault.message}", "error"))
