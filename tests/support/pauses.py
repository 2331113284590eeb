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


def stopped(root: psutil.Process) -> list[psutil.Process]:
    """Stop the process and all below it, those that start meanwhile included."""
    found: list[psutil.Process] = []
    while new := [each for each in [root, *root.children(recursive=True)] if each not in found]:
        send(signal.SIGSTOP, new)
        found += new
    return found


def main() -> int:
    command, pauses = subprocess.Popen(sys.argv[1:], env=os.environ), 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = command.wait(EVERY_S)
            print(f"{pauses} pauses of {PAUSE_S:g} s", file=sys.stderr)
            return code
        with suppress(psutil.NoSuchProcess):
            processes = stopped(psutil.Process(command.pid))
            with suppress(subprocess.TimeoutExpired):
                command.wait(PAUSE_S)
            send(signal.SIGCONT, processes)
            pauses += 1


if __name__ == "__main__":
    sys.exit(main())
