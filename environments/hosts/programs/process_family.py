"""Processes that this one has started: they end with it, and nothing that they start outlives them (Linux).

An episode's process *adopts* what it starts, and the host adopts what the process leaves behind at its end,
in whatever group or session that is.
"""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE_S = 0.01


def end_with_parent() -> None:
    """A hung environment must not outlive a runner that was killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """Who hears of the parent's end by another way has time to end what it has started."""
    LIBC.prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Those of this thread. While some of them end, the kernel may leave others out."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in listed.read_text().split()} if listed.exists() else set()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_orphans(known: set[int]) -> bool:
    """Kill the children that nobody knows. Whether there were any: their own children come to light later."""
    orphans = children() - known
    for pid in orphans:
        kill(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def kill_all(within_s: float) -> None:
    """End every descendant."""
    until = time.monotonic() + within_s
    with suppress(ChildProcessError):  # there is none left
        while time.monotonic() < until:
            for pid in children():
                kill(pid)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(PAUSE_S)
