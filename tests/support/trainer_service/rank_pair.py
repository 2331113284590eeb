"""Two ranks as real processes, which learn one task after the other: they start but once for many tests."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.trainer_service.rank_tasks import OVER, Task, Told, place_of, put
from tests.support.waiting import wait_until
from weir.stack.services import launcher as launcher_of

TORCH = (sys.executable, *launcher_of(2), "-m")
"""As `weir up` starts them."""
DEEPSPEED = (str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--module")
PATIENCE_S = 300.0
"""Processes start one after another, perhaps on a busy machine."""


class RankPair:
    """The launcher of two ranks, and the folder from which they take their tasks."""

    def __init__(self, folder: Path, launcher: "subprocess.Popen[bytes]") -> None:
        self._folder, self.launcher = folder, launcher
        self._tasks = 0

    def begin(self, task: Task) -> Path:
        """Give them a task. Returns the file that will say what they told of it."""
        place = place_of(self._folder, self._tasks)
        place.mkdir(parents=True)
        task.run.mkdir(exist_ok=True)
        put(task, place / "task.pickle")
        self._tasks += 1
        return place / "told.pickle"

    def end(self, told: Path) -> Told:
        """Wait until they have done it."""
        wait_until(lambda: told.exists() or self.launcher.poll() is not None, PATIENCE_S)
        assert told.exists(), f"the ranks ended with {self.launcher.poll()}"
        found: Told = pickle.loads(told.read_bytes())  # noqa: S301 - the test's own
        assert found.finite
        return found

    def learn(self, task: Task) -> Told:
        return self.end(self.begin(task))

    def ranks(self) -> list[psutil.Process]:
        """In their order."""
        workers = psutil.Process(self.launcher.pid).children()
        return sorted(workers, key=lambda worker: worker.environ()["RANK"])

    def close(self) -> int:
        """Let them end in order. Returns the launcher's status."""
        (self._folder / OVER).touch()
        return self.launcher.wait(PATIENCE_S)


@contextmanager
def rank_pair(folder: Path, launched_by: Sequence[str] = TORCH, *, forks: bool = True) -> Iterator[RankPair]:
    """Without `forks` the ranks that the launcher started learn themselves, and do one task."""
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
