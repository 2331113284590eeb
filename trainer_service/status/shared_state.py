"""What the trainer's two threads share: a snapshot one way, wishes the other.

main thread (DeepSpeed, Redis) ── snapshot ──▶ HTTP thread
                              ◀── pause, resume, checkpoint ──
"""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from rollout_queue.protocol.trainer import TrainerReport

Phase = Literal["waiting", "training", "publishing", "paused"]


@dataclass(frozen=True)
class Backlog:
    """What is ahead of a rollout that begins now: the gateways admit as much as is trained in time."""

    waiting: int = 0
    """Sessions that have ended, and are in no step yet."""
    owed: int = 0
    """Sessions that the weights contain, and no checkpoint yet."""
    per_step: float = 1.0
    """Rewarded rollouts that a step uses up, the ones that teach nothing included; mean of the last steps."""


@dataclass(frozen=True)
class Snapshot:
    """Where the trainer stands at one moment."""

    state: Phase = "waiting"
    step: int = 0
    version: int = 0
    waiting_for: str = "the trainer starts"
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """The same for sessions that are not trained, by version."""
    backlog: Backlog | None = None
    """None until the stream is taken up."""
    last_seen: float = field(default_factory=time.time)

    def report(self) -> TrainerReport:
        """As gateways and operators read it."""
        backlog = self.backlog
        return TrainerReport(
            state=self.state,
            step=self.step,
            version=self.version,
            waiting_for=self.waiting_for,
            last_seen=self.last_seen,
            metrics=self.metrics | self.evaluations,
            rollouts_waiting=backlog.waiting if backlog else None,
            rollouts_owed=backlog.owed if backlog else None,
            rollouts_per_step=backlog.per_step if backlog else None,
        )


class SharedState:
    """The one object that both threads touch."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        """Replaced whole by the main thread; reading an attribute is atomic."""
        self.ready = False
        """The model is loaded and the stream is read."""
        self._paused = threading.Event()
        self._pause_reason: str | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._wished: list[Future[Snapshot]] = []

    @property
    def paused(self) -> bool:
        return self._paused.is_set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def paused_for(self) -> str | None:
        """Why a guard paused the training; None where an operator did."""
        return self._pause_reason

    def pause(self, reason: str | None = None) -> None:
        """An operator who pauses what a guard has paused changes nothing."""
        self._pause_reason = reason or self._pause_reason
        self._paused.set()

    def explain(self, reason: str) -> None:
        """More is known of why a guard paused; nothing where somebody has resumed meanwhile."""
        with self._lock:
            if self._pause_reason is not None:
                self._pause_reason = reason

    def resume(self) -> None:
        with self._lock:
            self._pause_reason = None
            self._paused.clear()

    def stop(self) -> None:
        """Finish the step, then end. Safe in a signal handler."""
        self._stopping.set()

    def sleep(self, seconds: float) -> None:
        """Sleeps shorter when the trainer is told to stop."""
        self._stopping.wait(seconds)

    def request_checkpoint(self) -> "Future[Snapshot]":
        wish: Future[Snapshot] = Future()
        with self._lock:
            self._wished.append(wish)
        return wish

    def take_checkpoint_requests(self) -> "list[Future[Snapshot]]":
        with self._lock:
            wishes, self._wished = self._wished, []
        return wishes
