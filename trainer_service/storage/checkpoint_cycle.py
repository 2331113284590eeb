"""Decides when a checkpoint is made, and writes it while the training goes on.

main thread   is_due ─▶ copy of weights and position ─▶ the next steps ─▶ settle ─▶ acknowledge
a thread      └─▶ Checkpoints.write, until the disk accepts it ─▶ CURRENT ┘

One checkpoint is written at a time. When the next one is due, the training waits until the former is written.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import NamedTuple

from rollout_queue import clock
from trainer_service.groups.evaluation import EvaluationState
from trainer_service.heartbeat import REPORT_EVERY_S, Heartbeat
from trainer_service.settings import TrainerSettings
from trainer_service.storage.checkpoint import Checkpoints, ShardedWeights, Wanted
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.run_state import LedgerStep, RunState
from trainer_service.trainer_metrics import Stopwatch

CHEAP = 0.05
"""The share of the time since the last checkpoint that one may take before `checkpoint_every_minutes` have
passed."""


class Contents(NamedTuple):
    """What the cycle asks the trainer."""

    state: Callable[[], RunState]
    """What a checkpoint contains now, beside the weights."""
    evaluations: Callable[[], EvaluationState]
    wanted: Wanted
    durable: Callable[[], None]
    """Called when the last checkpoint is durable."""


class CheckpointCycle:
    """Collects the steps that no checkpoint contains yet, as lines of the ledger."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        weights: ShardedWeights,
        settings: TrainerSettings,
        heartbeat: Heartbeat,
        stopwatch: Stopwatch,
        disk: DiskRetry,
        contents: Contents,
    ) -> None:
        self._checkpoints, self._weights, self._settings = checkpoints, weights, settings
        self._heartbeat, self._stopwatch, self._disk = heartbeat, stopwatch, disk
        self._contents = contents
        self.versions = checkpoints.versions
        """The versions whose weights and optimizer can be restored."""
        self._writing: Future[None] | None = None
        self._new_steps: list[LedgerStep] = []
        self._saved_evaluations = EvaluationState()
        self._began_at, self._took_s = clock.monotonic(), 0.0
        self.waits_for: str | None = None
        """What the checkpoint that is written waits for."""

    def restore(self) -> RunState | None:
        """Load the last checkpoint; None if there is none. Raises CheckpointBroken."""
        state = self._checkpoints.restore(self._weights)
        if state is not None:
            self._saved_evaluations = state.evaluations
        return state

    def keep_initial(self, version: int) -> None:
        """Begin a checkpoint of the weights before the first step, unless there is one: the training may go
        back to them. To be called before `restore`. Raises LayoutRefused in the directory of another run."""
        self._checkpoints.take_over(self._weights)
        if version in self.versions():
            return
        self._heartbeat.confirm()
        unwritten = self._checkpoints.copied_initial(self._weights, version)
        write = partial(self._checkpoints.write_initial, unwritten, self._heartbeat.confirm)
        self._writing = self._checkpoints.executor.submit(copy_context().run, self._write, write)

    def load(self, version: int, rate_scale: float) -> None:
        """Go back to the weights, optimizer and schedule of a version. Raises CheckpointBroken."""
        self._checkpoints.load(self._weights, version, rate_scale)

    def add(self, step: LedgerStep) -> None:
        """Note that the weights contain this step now."""
        self._new_steps.append(step)

    def save_if_due(self) -> None:
        """Begin a checkpoint if it is time for one."""
        if self._is_due():
            self.begin()
        self.settle()

    def save_if_outdated(self) -> None:
        """Make a checkpoint if the last one is outdated. Returns when it is durable."""
        if self._is_outdated():
            self.begin()
        self.settle(wait=True)

    def save(self) -> None:
        """Make a checkpoint. Returns when it is durable."""
        self.begin()
        self.settle(wait=True)

    def begin(self) -> None:
        """Copy what a checkpoint contains, and write it in the background. Raises LeaseLost if another
        trainer has claimed the lease."""
        self.settle(wait=True)
        with self._stopwatch.timed("checkpoint"):
            self._heartbeat.confirm()
            began_at = self._began_at = clock.monotonic()
            state = self._contents.state()
            unwritten = self._checkpoints.copied(self._weights, state, self._new_steps, self._contents.wanted)
            self._new_steps = []
            self._saved_evaluations = state.evaluations
            write = partial(self._checkpoints.write, unwritten, self._heartbeat.confirm)
            self._writing = self._checkpoints.executor.submit(
                copy_context().run, self._write, write, began_at
            )

    def settle(self, *, wait: bool = False) -> None:
        """Note whether the checkpoint that is written is durable; with `wait`, wait until it is. Raises what
        its writing raised: LeaseLost, or Stopped if the trainer is told to stop while the disk refuses."""
        if self._writing is None:
            return
        with self._stopwatch.timed("checkpoint"):
            while wait and not self._writing.done():
                self._heartbeat.beat("waiting", self.waits_for or "the last checkpoint to be written")
                with suppress(TimeoutError):
                    self._writing.exception(REPORT_EVERY_S)
        if self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()
            self._contents.durable()

    def _is_due(self) -> bool:
        if not self._new_steps:  # new evaluations alone are not worth a whole checkpoint
            return False
        if (every_steps := self._settings.checkpoint_every_steps) is not None:
            return self._new_steps[-1].step % every_steps == 0
        passed_s = clock.monotonic() - self._began_at
        is_cheap = self._writing is None and self._took_s <= CHEAP * passed_s
        return is_cheap or passed_s >= 60 * self._settings.checkpoint_every_minutes

    def _is_outdated(self) -> bool:
        """Whether there are steps or evaluations that the last checkpoint does not contain."""
        return bool(self._new_steps) or self._contents.evaluations() != self._saved_evaluations

    def close(self) -> None:
        """Wait until nothing is written any more."""
        self._checkpoints.executor.shutdown()

    def _write(self, write: Callable[[], object], began_at: float | None = None) -> None:
        """Runs in the background. The time since `began_at` is what a checkpoint takes."""
        try:
            self._disk.until_written_behind("a checkpoint", write, self._note_wait)
        finally:
            self.waits_for = None
            if began_at is not None:
                self._took_s = clock.monotonic() - began_at

    def _note_wait(self, sentence: str) -> None:
        self.waits_for = sentence
