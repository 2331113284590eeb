"""Runs a command that does not outlive its parent: `python tether.py PARENT_PID COMMAND …`.

rollout server ── starts ──▶ tether ── becomes ──▶ SGLang
      └── killed, even with SIGKILL: the kernel kills SGLang, and SGLang's children follow it

Runs by its path, before anything is imported, and replaces itself: no process stays in between.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(f"process {parent_pid}, which started this, is gone")
    os.execvp(command[0], command)  # noqa: S606 - the command line is the rollout server's own


if __name__ == "__main__":
    main()
