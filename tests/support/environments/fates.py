"""An environment in which each task has a fate of its own: what its step does to its process."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.environments.toys import Ending


class Fates:
    """`fates` says by the task's seed what happens in its step; without one, the step is right. `notes` is a
    directory of files that tell a test what happens."""

    def __init__(self, notes: str, fates: dict[str, str]) -> None:
        self.notes, self.fates = Path(notes), fates

    def reset(self, task: dict[str, int]) -> str:
        self.fate = self.fates.get(str(task["seed"]), "right")
        self._note("host", os.getppid())
        self.scratch = tempfile.TemporaryDirectory(dir=self.notes)
        self.itself = self  # so that only the collector finds it
        if self.fate == "hangs at its reset":
            self._hang()
        drawn = f"{random.random()} {np.random.random()}"
        return f"fate {self.fate}, drew {drawn}"

    def step(self, answer: str) -> Ending:
        print("it steps")
        fates: dict[str, Callable[[], object]] = {
            "hangs": self._hang,
            "stops": self._stop,
            "raises": lambda: [][0],
            "exits": self._exit,
            "leaves": lambda: sys.exit("it has had enough"),
            "crashes": lambda: ctypes.string_at(0),
            "closes all": self._close_all,
            "leaves others behind": self._leave_behind,
        }
        if self.fate in fates:
            fates[self.fate]()
        return "long" * 2**24 if self.fate == "says too much" else None, 1.0, True, False, {}

    def close(self) -> None:
        if self.fate == "hangs at its close":
            self._hang()

    def _hang(self) -> None:
        self._note("hangs", os.getpid())
        time.sleep(1000)  # until it is killed

    def _close_all(self) -> None:
        os.closerange(3, 100)
        time.sleep(1000)  # until it is killed

    def _exit(self) -> None:
        print("it is over", end="", flush=True)
        os._exit(3)

    def _stop(self) -> None:
        self._note("hangs", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    def _leave_behind(self) -> None:
        """A process in a session of its own, without any variable of its host, whose parent has ended."""
        left = "import os, time; os.fork() and os._exit(0); time.sleep(1000)"
        with subprocess.Popen([sys.executable, "-c", left], env={}, start_new_session=True) as parent:
            self._note("session", parent.pid)
            parent.wait()

    def _note(self, what: str, pid: int) -> None:
        (self.notes / f"{what}-{pid}").touch()
