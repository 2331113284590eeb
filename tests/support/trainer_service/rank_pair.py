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

from tests.support.trainer_service.rank_tasks import OVER, Task, Told, held_path, place_of, put
from tests.support.waiting import wait_until
from weir.stack.services import launcher as launcher_of

TORCH = (sys.executable, *launcher_of(2), "-m")
"""The command by which `weir up` starts the ranks."""
DEEPSPEED = (str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--module")
PATIENCE_S = 300.0
"""Processes start one after another, and the machine may be busy."""


class RankPair:
    """The launcher process of two ranks, and the folder from which they read their tasks."""

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

    def ranks(self) -> list[psutil.Process]:
        """The processes, in the order of their ranks."""
        workers = psutil.Process(self.launcher.pid).children()
        return sorted(workers, key=lambda worker: worker.environ()["RANK"])

    def close(self) -> int:
        """Tell the ranks that no task follows, and wait. Returns the launcher's exit status."""
        (self._folder / OVER).touch()
        return self.launcher.wait(PATIENCE_S)


@contextmanager
def rank_pair(folder: Path, launched_by: Sequence[str] = TORCH, *, forks: bool = True) -> Iterator[RankPair]:
    """With `forks`, a rank forks a process for each task. Otherwise the rank does the task itself."""
    folder.mkdir(exist_ok=True)
    command = [*launched_by, "tests.support.trainer_service.two_ranks", str(folder)]
    command += ["--forks"] if forks else []
    environment = {
        **os.environ,
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
