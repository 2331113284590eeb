"""Runs a command while it and all of its processes stand still again and again, as on a machine that pauses.

python -m tests.support.pauses COMMAND…    stops for PAUSE_S seconds, EVERY_S seconds after the last stop
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

import psutil

PAUSE_S, EVERY_S = 6.0, 24.0


def send(which: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(which)


def runs(process: psutil.Process) -> bool:
    """Whether the process is there, and no test has stopped it."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_STOPPED
    return False


def stop(root: psutil.Process, stopped: list[psutil.Process]) -> None:
    """Stop the process and all below it, those that start meanwhile included, and add them to `stopped`."""
    while new := [each for each in family(root) if each not in stopped and runs(each)]:
        stopped += new
        send(signal.SIGSTOP, new)


def family(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def main() -> int:
    command, pauses = subprocess.Popen(sys.argv[1:], env=os.environ), 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = command.wait(EVERY_S)
            print(f"{pauses} pauses of {PAUSE_S:g} s", file=sys.stderr)
            return code
        stopped: list[psutil.Process] = []
        try:
            with suppress(psutil.NoSuchProcess, subprocess.TimeoutExpired):
                stop(psutil.Process(command.pid), stopped)
                pauses += 1
                command.wait(PAUSE_S)
        finally:
            send(signal.SIGCONT, stopped)


if __name__ == "__main__":
    sys.exit(main())
