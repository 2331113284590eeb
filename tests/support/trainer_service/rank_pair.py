"""Two ranks as real processes. They start once and learn one task after the other, for many tests."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from tests.support.trainer_service.device import SPARING
from tests.support.trainer_service.rank_tasks import (
    OVER,
    Task,
    Told,
    ended_path,
    held_path,
    place_of,
    put,
    ranks_path,
)
from tests.support.waiting import wait_until

DEEPSPEED = (str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--module")
PATIENCE_S = 300.0
"""Processes start one after another, and the machine may be busy."""


class RankPair:
    """The process that starts the ranks, and the folder from which they read their tasks."""

    def __init__(self, folder: Path, launcher: "subprocess.Popen[bytes]") -> None:
        self._folder, self.launcher = folder, launcher
        self._tasks = 0

    def begin(self, task: Task) -> Path:
        """Give the ranks a task. Returns the path where rank 0 will write its report."""
        place = place_of(self._folder, self._tasks)
        place.mkdir(parents=True)
        task.run.mkdir(exist_ok=True)
        put(task, place / "task.pickle")
        self._tasks += 1
        return place / "told.pickle"

    def end(self, told: Path) -> Told:
        """Wait until both ranks are done with the task, and return the report at this path."""
        files = [told, *(held_path(told.parent, rank) for rank in (0, 1))]
        wait_until(lambda: all(map(Path.exists, files)) or self.launcher.poll() is not None, PATIENCE_S)
        assert all(map(Path.exists, files)), f"the ranks ended with {self.launcher.poll()}"
        found: Told
        found, *held = (pickle.loads(path.read_bytes()) for path in files)  # noqa: S301 - the test's own
        assert found.finite
        return replace(found, held=held)

    def learn(self, task: Task) -> Told:
        return self.end(self.begin(task))

    def ranks(self, told: Path) -> list[psutil.Process]:
        """The forked processes of the task that reports at this path, in the order of their ranks."""
        path = ranks_path(told.parent)
        wait_until(path.exists, PATIENCE_S)
        return [psutil.Process(pid) for pid in pickle.loads(path.read_bytes())]  # noqa: S301 - the test's own

    def ended(self, told: Path) -> list[int]:
        """Wait until the forked processes of the task have ended. Returns their exit statuses."""
        path = ended_path(told.parent)
        wait_until(path.exists, PATIENCE_S)
        statuses: list[int] = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
        return statuses

    def close(self) -> int:
        """Tell the ranks that no task follows, and wait. Returns the launcher's exit status."""
        (self._folder / OVER).touch()
        return self.launcher.wait(PATIENCE_S)


@contextmanager
def rank_pair(folder: Path, launched_by: Sequence[str] = ()) -> Iterator[RankPair]:
    """Without a launcher, one process imports everything, and forks both ranks for each task."""
    folder.mkdir(exist_ok=True)
    module = "tests.support.trainer_service.two_ranks"
    if launched_by:
        command = [*launched_by, module, str(folder)]
    else:
        command = [sys.executable, "-m", module, str(folder), "--forks"]
    environment = {
        **os.environ,
        **SPARING,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([".", "queue"]),
    }
    with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:
        try:
            yield RankPair(folder, launcher)
        finally:
            if launcher.poll() is None:
                for worker in psutil.Process(launcher.pid).children(recursive=True):
                    worker.kill()
            launcher.kill()
