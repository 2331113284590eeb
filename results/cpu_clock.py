"""Measures the CPU time of a process and of all that it started, while they run."""

import threading
import time
from bisect import bisect_right
from types import TracebackType
from typing import Self

import psutil

EVERY_S = 1.0


class CpuClock:
    """A context in whose end one can ask how much CPU time had been used at a moment before."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._used: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._note()

    def seconds_at(self, moment: float) -> float:
        """The wall time from the begin to the moment, which is in Unix seconds."""
        return moment - self._moments[0]

    def cpu_s_at(self, moment: float) -> float:
        """The CPU seconds from the begin to the moment, between two measurements in proportion."""
        place = min(max(bisect_right(self._moments, moment), 1), len(self._moments) - 1)
        (left, right), (below, above) = (
            self._moments[place - 1 : place + 1],
            self._used[place - 1 : place + 1],
        )
        share = min(1.0, max(0.0, (moment - left) / max(right - left, 1e-9)))
        return below + share * (above - below) - self._used[0]

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._note()

    def _note(self) -> None:
        self._used.append(used_s())
        self._moments.append(time.time())


def used_s() -> float:
    """The CPU seconds of this process, of all that it started and that still runs, and of its children that
    have ended."""
    here = psutil.Process()
    own = here.cpu_times()
    spent = own.children_user + own.children_system
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        spent += times.user + times.system
    return spent
