"""The processes of a host (Linux): those of episodes are copies of the one that has imported the library; all
end with the host, and nothing that they start outlives them.

A copy has none of the threads of that process, and shares its connections and event loops. A library that has
made any when it is imported, or for the environment as a whole, is imported anew in each process.

Processes that begin alike must not draw alike: each begins with random numbers that were drawn from the
process-wide generators, one after the other. So a library that seeds them has the same draws in each run.

An episode's process *adopts* what it starts, and the host adopts what the process leaves behind at its end,
in whatever group or session that is.
"""

import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE_S = 0.01


def end_with_parent() -> None:
    """A hung environment must not outlive a runner that was killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_parent() -> None:
    """A process that learns of its parent's end in another way has time to end what it has started."""
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


SHARED = ("socket:", "pipe:", "anon_inode:")
"""Descriptors that two processes cannot use side by side."""
THREADS_END_WITHIN_S = 1.0
LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many descriptors a process may have. The host needs three for each episode, so it takes all it may."""


def take_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT[1], LIMIT[1]))


def descriptors() -> set[str]:
    """What is open that two processes cannot use side by side."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing itself
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith(SHARED)}


def lost_in_a_copy(before: set[str]) -> str | None:
    """What a copy of this process would lack or share, beside what was open before; None if nothing. Some
    libraries end their threads for the time of a fork: OpenBLAS does."""
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    until = time.monotonic() + THREADS_END_WITHIN_S
    while (threads := len([*Path("/proc/self/task").iterdir()]) - 1) and time.monotonic() < until:
        time.sleep(0.01)
    if threads:
        return f"threads ({threads})"
    return ", ".join(sorted(descriptors() - before)) or None


def begun(program: Callable[[int], None], leaves: Iterable[int]) -> tuple[int, socket.socket, int, int]:
    """A process that runs `program` with its end of a channel: its id, our end, a pipe with what it prints,
    and a descriptor of the process. `leaves` are the descriptors that it does not keep. Raises OSError."""
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        reads, writes = os.pipe()
    except OSError:
        ours.close()
        theirs.close()
        raise
    pid = None
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            _live(parent, program, theirs.detach(), writes, [ours.detach(), reads, *leaves])
        return pid, ours, reads, os.pidfd_open(pid)
    except OSError:
        ours.close()
        os.close(reads)
        if pid:
            kill(pid)
            os.waitpid(pid, 0)
        raise
    finally:
        theirs.close()
        os.close(writes)


def _live(
    parent: int, program: Callable[[int], None], channel: int, prints: int, leaves: Iterable[int]
) -> NoReturn:
    """The life of the new process. Nothing of its parent's program may run in it."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, LIMIT)
        end_with_parent()
        if os.getppid() != parent:
            os._exit(code)
        adopt_orphans()
        os.dup2(prints, 1)
        os.dup2(prints, 2)
        for each in (prints, *leaves):
            os.close(each)
        program(channel)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End at once: a library's threads and handlers of the exit have no say. What an episode has left to its
    finalizers is done, such as the removal of a directory."""
    try:
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def drawn() -> dict[str, int]:
    """A number of each generator that is loaded, with which another process begins."""
    numbers = {"random": random.getrandbits(64)}
    if numpy_random := sys.modules.get("numpy.random"):
        numbers["numpy"] = int(numpy_random.randint(2**31))
    if torch := sys.modules.get("torch"):
        numbers["torch"] = int(torch.randint(2**62, ()))
    return numbers


def begin_with(numbers: dict[str, int]) -> None:
    """Begin the generators with what was drawn elsewhere."""
    random.seed(numbers["random"])
    if "numpy" in numbers:
        sys.modules["numpy.random"].seed(numbers["numpy"])
    if "torch" in numbers:
        sys.modules["torch"].manual_seed(numbers["torch"])
