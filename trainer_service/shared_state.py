"""The state that the trainer's main thread and its HTTP thread share.

main thread (DeepSpeed, Redis) ── snapshot, recoveries ─────────────────▶ HTTP thread
                               ◀── pause, resume, checkpoint, rollback ──
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import asdict

from rollout_queue import clock
from rollout_queue.http.probe_routes import release
from rollout_queue.protocol.message import ModelCheck
from rollout_queue.protocol.trainer_messages import DiskRoom, RecoveryReport, TrainerReport
from trainer_service.groups.guards import Recovery, RecoveryState
from trainer_service.groups.task_rates import TaskRate

Phase = Literal["waiting", "training", "publishing", "paused"]


@dataclass(frozen=True)
class Backlog:
    """What the trainer has to do before it trains a rollout that begins now. From this, gateways compute how
    many sessions they may admit."""

    waiting: int = 0
    """Sessions that have ended, and that no step has used yet."""
    owed: int = 0
    """Sessions that were trained, but are in no checkpoint yet."""
    per_step: float = 1.0
    """As `Tally.rollouts_per_step`."""
    groups: int = 0
    groups_different: int = 0


@dataclass(frozen=True)
class StatusSnapshot:
    """The trainer's status at one moment. TrainerReport explains its fields."""

    state: Phase = "waiting"
    step: int = 0
    version: int = 0
    waiting_for: str = "the trainer starts"
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """Metrics of evaluation sessions, which are not trained, by version."""
    backlog: Backlog | None = None
    """None until the trainer has read the stream."""
    refuses_while_paused: bool = False
    """Whether gateways open no sessions for training while the training is paused."""
    url: str | None = None
    source: str = "turns"
    """What the trainer learns from."""
    max_row_tokens: int | None = None
    recoveries: Sequence[Recovery] = ()
    disk: DiskRoom | None = None
    """The disk of the checkpoints; None if it could not be looked at."""
    last_seen: float = field(default_factory=clock.now)
    """When the main thread last reported, in seconds since 1970."""

    def report(self) -> TrainerReport:
        """The message that gateways and operators read."""
        backlog = self.backlog
        return TrainerReport(
            state=self.state,
            step=self.step,
            version=self.version,
            waiting_for=self.waiting_for,
            last_seen=self.last_seen,
            url=self.url,
            source=self.source,
            release=release(),
            max_row_tokens=self.max_row_tokens,
            metrics=self.metrics | self.evaluations,
            refuses_training=self.refuses_while_paused and self.state == "paused",
            rollouts_waiting=backlog.waiting if backlog else None,
            rollouts_owed=backlog.owed if backlog else None,
            rollouts_per_step=backlog.per_step if backlog else None,
            groups=backlog.groups if backlog else None,
            groups_different=backlog.groups_different if backlog else None,
            recoveries=[RecoveryReport(**asdict(each)) for each in self.recoveries],
            disk=self.disk,
        )


class NotRestorable(Exception):
    """No checkpoint has the version that an operator wants to go back to."""


class SharedState:
    """The object through which the two threads exchange status and requests."""

    def __init__(self) -> None:
        self.snapshot = StatusSnapshot()
        """The main thread replaces the whole object, so the HTTP thread reads it without a lock."""
        self.tasks: Sequence[TaskRate] = ()
        """How often the policy solves each task. Replaced in the same way."""
        self.model_checks: tuple[ModelCheck, ...] = ()
        """What was found out about the model when the trainer started. Replaced in the same way."""
        self.recovery = RecoveryState()
        self.restorable: Sequence[int] = ()
        """The versions to which the training can go back. Both are replaced in the same way."""
        self.disk: DiskRoom | None = None
        """The disk of the checkpoints. A thread of its own replaces this."""
        self.ready = False
        """Whether the model is loaded and the stream is read."""
        self._paused = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._requests: list[Future[StatusSnapshot]] = []
        self._rollbacks: list[tuple[int, Future[StatusSnapshot]]] = []

    @property
    def paused(self) -> bool:
        return self._paused.is_set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def pause(self) -> None:
        """Let the main thread wait before the next step."""
        self._paused.set()

    def resume(self) -> None:
        self._paused.clear()

    def stop(self) -> None:
        """Let the main thread finish the step, then end. Safe in a signal handler."""
        self._stopping.set()

    def sleep(self, seconds: float) -> None:
        """Returns early when the trainer is told to stop."""
        clock.wait(self._stopping, seconds)

    def request_checkpoint(self) -> "Future[StatusSnapshot]":
        """Ask the main thread for a checkpoint. The future's result is the status after the checkpoint."""
        request: Future[StatusSnapshot] = Future()
        with self._lock:
            self._requests.append(request)
        return request

    def answer_checkpoint_requests(self, save: Callable[[], None]) -> None:
        """If there are requests, call `save` once and answer all of them."""
        with self._lock:
            requests, self._requests = self._requests, []
        if not requests:
            return
        save()
        for request in requests:
            if request.set_running_or_notify_cancel():  # False if the caller no longer waits
                request.set_result(self.snapshot)

    def request_rollback(self, version: int) -> "Future[StatusSnapshot]":
        """Ask the main thread to go back to a version. The future's result is the status after that."""
        request: Future[StatusSnapshot] = Future()
        with self._lock:
            self._rollbacks.append((version, request))
        return request

    def answer_rollback_requests(self, roll_back: Callable[[int], None]) -> None:
        """Call `roll_back` for each request whose caller still waits. It raises NotRestorable for a version
        without a checkpoint."""
        with self._lock:
            requests, self._rollbacks = self._rollbacks, []
        for version, request in requests:
            if not request.set_running_or_notify_cancel():
                continue
            try:
                roll_back(version)
            except BaseException as error:
                request.set_exception(error)
                if not isinstance(error, NotRestorable):
                    raise
            else:
                request.set_result(self.snapshot)
