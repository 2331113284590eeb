"""Makes this process the only trainer, and reports that it is alive, what it does and what it waits for, to
the HTTP thread and the gateways.

If no process holds the lease, this process starts at once. If the holder has crashed, this process starts
when the lease expires, or earlier if it sees that the holder has ended. If the holder renews the lease, this
process ends.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rollout_queue import clock
from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.protocol.trainer_messages import MOST_RECOVERIES, DiskRoom
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_reader import StreamReader
from trainer_service.groups.guards import RecoveryState
from trainer_service.groups.task_rates import TaskRate
from trainer_service.shared_state import Backlog, Phase, SharedState

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
LONGEST_PAUSE_S = 30.0

Reply = TypeVar("Reply")


class Stopped(Exception):
    """The trainer was told to stop while it waited. It was between two actions, and left none incomplete."""


class Heartbeat:
    """The main thread calls `beat` often. Redis gets a report twice a second, and when the phase changes."""

    def __init__(self, stream: StreamReader, shared_state: SharedState, retry_s: float) -> None:
        self._stream, self._shared_state = stream, shared_state
        self._retry_s = retry_s
        self._reported_at = 0.0

    def note(self, step: int, version: int, metrics: dict[str, float] | None = None) -> None:
        """Set the step, version and metrics of the next reports. Without `metrics`, the former ones stay."""
        before = self._shared_state.snapshot
        self._shared_state.snapshot = replace(
            before, step=step, version=version, metrics=before.metrics if metrics is None else metrics
        )
        self._reported_at = 0.0

    def note_evaluations(self, evaluations: dict[str, float]) -> None:
        self._shared_state.snapshot = replace(self._shared_state.snapshot, evaluations=evaluations)
        self._reported_at = 0.0

    def note_refusal(self, while_paused: bool) -> None:
        """Note whether gateways open no sessions for training while the training is paused."""
        self._shared_state.snapshot = replace(self._shared_state.snapshot, refuses_while_paused=while_paused)

    def note_row_bound(self, tokens: int | None) -> None:
        """Note the largest number of tokens of a row that is trained; None without a bound."""
        self._shared_state.snapshot = replace(self._shared_state.snapshot, max_row_tokens=tokens)

    def note_backlog(self, backlog: Backlog) -> None:
        self._shared_state.snapshot = replace(self._shared_state.snapshot, backlog=backlog)

    def note_recoveries(self, state: RecoveryState, restorable: Collection[int]) -> None:
        """Note when the training was set back, and the versions to which it can go back."""
        self._shared_state.recovery, self._shared_state.restorable = state, sorted(restorable)
        snapshot = self._shared_state.snapshot
        self._shared_state.snapshot = replace(snapshot, recoveries=state.done[-MOST_RECOVERIES:])
        self._reported_at = 0.0

    def note_tasks(self, tasks: Sequence[TaskRate]) -> None:
        self._shared_state.tasks = tasks

    def beat(self, phase: Phase, waiting_for: str | None = None) -> None:
        """Report the phase. `waiting_for` says what the trainer waits for; by default the phase says it."""
        before = self._shared_state.snapshot
        sentence = waiting_for or _SENTENCES[phase]
        self._shared_state.snapshot = replace(
            before, state=phase, waiting_for=sentence, last_seen=clock.now(), disk=self._shared_state.disk
        )
        now = clock.monotonic()
        if now - self._reported_at >= REPORT_EVERY_S or phase != before.state:
            self._reported_at = now
            self._report()

    def confirm(self) -> None:
        """Raises LeaseLost if another trainer has claimed the lease. Only logs if Redis does not answer."""
        try:
            self._stream.confirm()
        except StorageUnavailable as error:
            logger.warning("the lease could not be confirmed: %s", error)

    def retry(
        self, call: Callable[[], Reply], failure: type[Exception], phase: Phase, what: str | None = None
    ) -> Reply:
        """Repeat `call` until it does not raise `failure`, with longer and longer pauses. Raises Stopped when
        told to stop.

        `what` names what the trainer waits for; by default the phase names it.
        """
        sentence = what or _SENTENCES[phase]
        pause_s = self._retry_s
        while True:
            try:
                return call()
            except failure as error:
                logger.warning("waiting for %s (%s); trying again in %g s", sentence, error, pause_s)
                self._wait(pause_s, phase, f"{sentence} ({error})")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def becomes(self, condition: Callable[[], bool], tries: int, phase: Phase, what: str) -> bool:
        """Whether `condition` is true within so many tries, each after a longer pause. Raises Stopped."""
        pause_s = self._retry_s
        for _ in range(tries):
            self._wait(pause_s, phase, what)
            if condition():
                return True
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return False

    def retry_quietly(
        self, call: Callable[[], Reply], failure: type[Exception], what: str, note: Callable[[str], None]
    ) -> Reply:
        """As `retry`, for another thread: it reports nothing, and calls `note` with what it waits for."""
        pause_s = self._retry_s
        while True:
            try:
                return call()
            except failure as error:
                logger.warning("waiting for %s (%s); trying again in %g s", what, error, pause_s)
                note(f"{what} ({error})")
                self._shared_state.sleep(pause_s)
                if self._shared_state.stopping:
                    raise Stopped from error
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def wait_for(
        self, future: Future[Reply], phase: Phase, what: Callable[[], str | None] = lambda: None
    ) -> None:
        """Wait until `future` is done, and report meanwhile; `what` tells what the trainer waits for. Raises
        Stopped when told to stop."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not future.done():
            if self._shared_state.stopping:
                raise Stopped
            clock.wait(done, REPORT_EVERY_S)
            self.beat(phase, what())

    def _wait(self, seconds: float, phase: Phase, sentence: str) -> None:
        until = clock.monotonic() + seconds
        while (left_s := until - clock.monotonic()) > 0:
            if self._shared_state.stopping:
                raise Stopped
            self.beat(phase, sentence)
            self._shared_state.sleep(min(left_s, REPORT_EVERY_S))

    def _report(self) -> None:
        try:
            self._stream.report(self._shared_state.snapshot.report().fields())
        except StorageUnavailable as error:
            logger.warning("the status could not be reported: %s", error)


_SENTENCES: dict[Phase, str] = {
    "waiting": "the stream to answer",
    "training": "the optimizer",
    "publishing": "the gateway to push the newest version",
    "paused": "POST /resume",
}


LOOK_AT_DISK_EVERY_S = 10.0


def watch_disk(directory: Path, shared_state: SharedState) -> None:
    """Look at the room on the disk of `directory`, in a thread, until the trainer is told to stop. A disk
    that hangs stops neither the training nor the lease."""

    def watch() -> None:
        while not shared_state.stopping:
            try:
                usage = shutil.disk_usage(directory)
                shared_state.disk = DiskRoom(free_bytes=usage.free, total_bytes=usage.total)
            except OSError as error:
                logger.warning("the room on the disk of %s is not known: %s", directory, error)
                shared_state.disk = None
            shared_state.sleep(LOOK_AT_DISK_EVERY_S)

    threading.Thread(target=copy_context().run, args=(watch,), name="disk", daemon=True).start()


ASK_EVERY_S = 0.5
ROUNDING_S = 0.05
"""The largest error of the time that Redis reports to be left. A renewal changes it by far more."""


@contextmanager
def keep_lease(lease: Lease, shared_state: SharedState, retry_s: float) -> Iterator[bool]:
    """Hold the lease inside the block; a thread renews it. Yields True if this process has the lease,
    and False if the trainer was told to stop first.

    Raises SystemExit if another trainer holds the lease and renews it.
    """
    if not _claimed(lease, shared_state, retry_s):
        yield False
        return
    logger.info("holds %s as %s", key_names.LEASE, lease.holder)
    ended = threading.Event()
    keeper = threading.Thread(
        target=copy_context().run, args=(_keep, lease, ended), name="lease", daemon=True
    )
    keeper.start()
    try:
        yield True
    finally:
        ended.set()
        keeper.join()
        with suppress(StorageUnavailable):  # the lease then expires by itself
            lease.release()


def _claimed(lease: Lease, shared_state: SharedState, retry_s: float) -> bool:
    """Claim the lease; returns False if the trainer is told to stop first. A lease that its holder does not
    renew belongs to a trainer that crashed. Raises SystemExit if the holder renews it."""
    expires_at_s: float | None = None
    while not shared_state.stopping:
        asked_s = clock.monotonic()
        try:
            held = lease.claim()
        except StorageUnavailable as error:
            logger.warning("%s; trying again in %g s", error, retry_s)
            shared_state.sleep(retry_s)
            continue
        if held is None:
            return True
        if expires_at_s is None:
            expires_at_s = clock.monotonic() + held.expires_in_s
            logger.warning(
                "%s belongs to %s; unless renewed, it expires in %.1f s",
                key_names.LEASE,
                held.holder,
                held.expires_in_s,
            )
        elif asked_s + held.expires_in_s > expires_at_s + ROUNDING_S:
            raise SystemExit(f"another trainer holds {key_names.LEASE}: {held.holder}")
        shared_state.sleep(min(ASK_EVERY_S, held.expires_in_s + 0.01))
    return False


def _keep(lease: Lease, ended: threading.Event) -> None:
    """Renew the lease after every third of its duration. If another trainer has claimed it, this thread
    ends, and the main thread's next use of the stream raises LeaseLost."""
    while not clock.wait(ended, lease.lease_s / 3):
        try:
            lease.renew()
        except StorageUnavailable as error:
            logger.warning("%s not renewed: %s", key_names.LEASE, error)
        except LeaseLost as error:
            logger.error("%s", error)
            return
