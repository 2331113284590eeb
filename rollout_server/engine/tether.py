"""Runs a command that ends with its parent: `python tether.py PARENT_PID COMMAND …`.

rollout server ── starts ──▶ tether ── becomes ──▶ SGLang
      └── killed, even with SIGKILL: the kernel kills SGLang, and SGLang's children end with it

The tether asks the kernel for a SIGKILL when its parent dies (`prctl(2)`), and replaces itself by the
command. The rollout server runs this file by its path, so it imports nothing of Weir.
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
