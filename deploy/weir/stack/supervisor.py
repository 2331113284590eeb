"""The parent process of `weir up`: it restarts services that end, until it is told to stop.

weir up ──settings on stdin──▶ python -m weir.stack.supervisor ──▶ Stack
   ├──── waits for stack.json to say "up" or "failed" ◀────────┘
   └──── STAY on stdin ──▶ it goes on; the end of stdin without it, since `weir up` was killed ──▶ it stops
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from rollout_queue import clock
from rollout_queue.private_file import append_private
from weir.errors import ServiceDied, StackError
from weir.stack import stack_state
from weir.stack.settings import PYTHON, StackSettings
from weir.stack.stack import Stack
from weir.stack.stack_state import ProcessState, StackState

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STILL_EVERY_S = 15.0
"""How long nothing is said while nothing changes."""
STAY = b"stay\n"
"""What `weir up` writes when all services are ready."""
STEADY_AFTER_S = 60.0
"""A service that ran this long has recovered, so the pause before its next restart is short again."""


@dataclass
class Backoff:
    """The pause before a restart: it doubles each time a service ends soon after its start."""

    wait_s: float = FIRST_BACKOFF_S
    due_at: float | None = None
    started_at: float = field(default_factory=clock.monotonic)

    def died(self, now: float) -> None:
        if now - self.started_at > STEADY_AFTER_S:
            self.wait_s = FIRST_BACKOFF_S
        self.due_at = now + self.wait_s
        self.wait_s = min(self.wait_s * 2, LONGEST_BACKOFF_S)

    def started(self, now: float) -> None:
        self.due_at, self.started_at = None, now


def stop_if_abandoned(stdin: BinaryIO) -> None:
    """End this process if `weir up` ends before all services are ready. Otherwise services would start that
    nobody waits for. `stdin` has no buffer: Python cannot end while a thread waits in one."""

    def watch() -> None:
        if stdin.readline() != STAY:
            logger.error("`weir up` was killed before all services were ready, so they stop")
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class Supervisor:
    """Restarts services that have ended."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._backoffs = {name: Backoff() for name in stack.processes}

    def check(self) -> None:
        """Look at each service once, and restart it when its pause is over."""
        now = clock.monotonic()
        self._stack.note_descendants()
        for name, process in self._stack.processes.items():
            backoff = self._backoffs[name]
            if backoff.due_at is not None:
                if now >= backoff.due_at:
                    self._stack.restart(name)
                    backoff.started(now)
                    self._stack.write_state("up")
                continue
            try:
                process.check()
            except ServiceDied as death:
                backoff.died(now)
                said = f"it restarts in {(backoff.due_at or now) - now:.0f} s"
                if process.exit_code == 0:
                    logger.info("%s has ended, as it was asked to; %s", name, said)
                else:
                    logger.error("%s\n%s", death, said)


def run(settings: StackSettings) -> int:
    """Run the stack until a signal ends the process. Returns 1 when it cannot start or go on."""
    try:
        with Stack(settings) as stack:
            stack.wait_ready(on_wait=lambda waiting: logger.info("waiting for %s", waiting))
            logger.info("up: %s", stack.gateway_url)
            supervisor = Supervisor(stack)
            while True:
                supervisor.check()
                clock.pause(WATCH_EVERY_S)
    except StackError as error:
        logger.error("%s", error)
        StackState(parent=ProcessState.of(0), phase="failed", detail=str(error)).write(settings.run_dir)
        return 1


def start_detached(settings: StackSettings) -> subprocess.Popen[bytes]:
    """Start the supervisor in a Unix session of its own, so that it outlives the terminal."""
    settings.logs_dir.mkdir(parents=True, exist_ok=True)
    stack_state.path_in(settings.run_dir).unlink(missing_ok=True)
    with append_private(settings.logs_dir / "supervisor.log") as log:
        child = subprocess.Popen(
            [PYTHON, "-m", "weir.stack.supervisor"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert child.stdin is not None  # noqa: S101 - `stdin` is a pipe
    # Over a pipe, because settings hold keys, and every user can read a process' arguments.
    child.stdin.write(settings.model_dump_json().encode() + b"\n")
    child.stdin.flush()
    return child


def wait_up(
    child: subprocess.Popen[bytes], settings: StackSettings, on_wait: Callable[[str], None]
) -> StackState:
    """Wait until all services are ready, and return their state. Raises StackError with the reason if not."""
    assert child.stdin is not None  # noqa: S101 - `stdin` is a pipe
    with suppress(BrokenPipeError), child.stdin:
        found = _waited(child, settings, on_wait)
        child.stdin.write(STAY)
    return found


def _waited(
    child: subprocess.Popen[bytes], settings: StackSettings, on_wait: Callable[[str], None]
) -> StackState:
    reported, began_at = "", clock.monotonic()
    told_at = began_at
    while child.poll() is None:
        now = stack_state.read(settings.run_dir)
        if now and now.phase == "up":
            return now
        detail, at = (now.detail if now else ""), clock.monotonic()
        if detail and detail != reported:
            reported, told_at = detail, at
            on_wait(reported)
        elif at - told_at >= STILL_EVERY_S:
            told_at = at
            on_wait(f"{reported or 'the supervisor'} ({at - began_at:.0f} s so far)")
        clock.pause(WATCH_EVERY_S)
    last = stack_state.read(settings.run_dir)
    reason = last.detail if last else f"the supervisor has ended: see {settings.logs_dir / 'supervisor.log'}"
    raise StackError(reason)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    unbuffered = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - open as long as the process
    given = StackSettings.model_validate_json(unbuffered.readline())
    stop_if_abandoned(unbuffered)
    sys.exit(run(given))
