"""Two ranks that publish versions beside the training, and what a test does to the disk of rank 1."""

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rollout_queue.contract.published_policy import FileSpec
from tests.support.trainer_service.rank_tasks import FULL, SLOW, WRITING, Task
from trainer_service.model.deepspeed_policy import DeepSpeedPolicy
from trainer_service.model.host_copies import WeightSnapshot
from trainer_service.step.ranks import DistributedPolicy
from trainer_service.storage.durable_files import DiskRefused
from trainer_service.storage.policy_store import PolicyStore

LOOKS_EVERY_S = 0.02
Write = Callable[[WeightSnapshot, Path, int], list[FileSpec]]


class CountedPolicy(DeepSpeedPolicy):
    """Notes the most bytes that a snapshot of this rank holds."""

    held_bytes = 0

    def snapshot(self, spread: bool = False) -> WeightSnapshot:
        taken = super().snapshot(spread)
        self.held_bytes = max(self.held_bytes, sum(tensor.value.nbytes for tensor in taken.tensors))
        return taken


class Publications:
    """As the trainer's publisher: writes one version at a time in a thread, and repeats it while a disk is
    full."""

    def __init__(self, leader: DistributedPolicy, task: Task) -> None:
        self._leader, self._task = leader, task
        self._executor = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self.refusals = 0

    def after(self, step: int) -> None:
        """Publish version `step`, if the task says so."""
        if step in self._task.publishes:
            self.wait()
            self._running = self._executor.submit(self._write, step, self._leader.snapshot())

    def _write(self, version: int, snapshot: WeightSnapshot) -> None:
        store = PolicyStore(self._task.policies, self._task.settings.model_path, keep=10, anchor_every=10)
        while True:
            try:
                store.write(version, version, snapshot.write)
                return
            except DiskRefused:
                self.refusals += 1
                (self._task.run / FULL).unlink(missing_ok=True)

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()


def hinder_writes(run: Path) -> None:
    """Let the files `slow` and `full` in the task's directory decide how this rank's disk behaves."""
    write = WeightSnapshot.write_share

    def hindered(snapshot: WeightSnapshot, directory: Path, file_bytes: int) -> list[FileSpec]:
        (run / WRITING).touch()
        while (run / SLOW).exists():
            time.sleep(LOOKS_EVERY_S)  # the test removes the file, and nothing else announces it
        if (run / FULL).exists():
            (directory / "model-half.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(snapshot, directory, file_bytes)

    WeightSnapshot.write_share = hindered  # type: ignore[method-assign, assignment]


def note_synced(path: Path) -> None:
    """Append the name of each file that this rank syncs to the file at `path`."""
    sync = os.fsync

    def noting(descriptor: int) -> None:
        sync(descriptor)
        with path.open("a", encoding="utf-8") as file:
            file.write(Path(f"/proc/self/fd/{descriptor}").readlink().name + "\n")

    os.fsync = noting  # type: ignore[assignment]
