"""What commands do with a stack that another process runs: stop it, also if its parent has died; end one
service, which its supervisor starts again; and read the logs.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollout_queue import clock
from rollout_queue.config_file import meant
from weir.errors import StackError
from weir.stack import stack_state
from weir.stack.service_process import ready_of
from weir.stack.settings import StackSettings
from weir.stack.stack_state import ProcessState, StackState

POLL_EVERY_S = 0.25


def restart(settings: StackSettings, name: str, say: Callable[[str], None]) -> int:
    """End a service, wait until it is ready again, and return its new process id. Raises StackError."""
    before = _service(settings, name)
    process = before.process()
    say(f"stopping {name}, pid {before.pid}")
    if process is not None:
        process.terminate()
        _, alive = psutil.wait_procs([process], timeout=settings.stop_timeout_s)
        for each in alive:
            each.kill()
    deadline = clock.monotonic() + settings.start_timeout_s
    while clock.monotonic() < deadline:
        now = _service(settings, name)
        if now.pid != before.pid and now.process() is not None and ready_of(now.url)() is None:
            return now.pid
        clock.pause(POLL_EVERY_S)
    raise StackError(f"{name} is not ready after {settings.start_timeout_s:.0f} s: see `weir logs {name}`")


def _service(settings: StackSettings, name: str) -> ProcessState:
    found: StackState | None = stack_state.read(settings.run_dir)
    if found is None or found.parent.process() is None:
        raise StackError(
            f"no `weir up` runs in {settings.run_dir}, which would start a service again: start all with "
            "`weir up`, or name the directory of another run (--run-dir)"
        )
    if name not in found.services:
        raise StackError(f"there is no service {name!r} in {settings.run_dir}{meant(name, found.services)}")
    return found.services[name]


def stop(run_dir: Path, timeout_s: float) -> list[str]:
    """Tell the parent to stop its services, then stop those that still run. Returns a sentence per action."""
    found = stack_state.read(run_dir)
    if found is None or found.phase == "failed":
        stack_state.path_in(run_dir).unlink(missing_ok=True)
        return [f"no services run in {run_dir}"]
    done = [_stop_parent(found, timeout_s)]
    for name, service in reversed(found.services.items()):
        process = service.process()
        if process is not None:
            _stop_tree(process, timeout_s)
            done.append(f"{name} (pid {service.pid}) was still running and is stopped")
    stack_state.path_in(run_dir).unlink(missing_ok=True)
    return done


def _stop_parent(found: StackState, timeout_s: float) -> str:
    parent = found.parent.process()
    if parent is None:
        return f"the parent process (pid {found.parent.pid}) no longer runs"
    parent.send_signal(signal.SIGTERM)
    try:
        # Its services stop one after the other, each with the same deadline.
        parent.wait(timeout_s * (len(found.services) + 1))
    except psutil.TimeoutExpired:
        parent.kill()
        return f"pid {parent.pid} did not stop its services in time and was killed"
    return f"stopped {', '.join(reversed(found.services))}"


def _stop_tree(process: psutil.Process, timeout_s: float) -> None:
    family = {process, *process.children(recursive=True)}
    process.terminate()
    psutil.wait_procs([process], timeout=timeout_s)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


MOST_READ_BYTES = 4 << 20
"""How much of a log is read at once."""


@dataclass
class LogEnd:
    """The end of a log, as far as it was read: whole lines only."""

    path: Path
    _read: int = 0

    def last(self, count: int) -> list[str]:
        """The last `count` lines."""
        self._read = max(0, self.path.stat().st_size - MOST_READ_BYTES)
        lines = self.new()
        return lines[-count:] if count else []

    def new(self) -> list[str]:
        """What was written since. A log that was begun anew is read from its beginning."""
        try:
            with self.path.open("rb") as log:
                if log.seek(0, os.SEEK_END) < self._read:
                    self._read = 0
                log.seek(self._read)
                whole, newline, _ = log.read(MOST_READ_BYTES).rpartition(b"\n")
        except FileNotFoundError:  # it is just begun anew
            return []
        self._read += len(whole + newline)
        return whole.decode(errors="replace").splitlines()


def logs_in(directory: Path, name: str | None) -> dict[str, LogEnd]:
    """The logs in the directory by name, or the one of this name. Raises StackError if there is none."""
    found = {each.stem: LogEnd(each) for each in sorted(directory.glob("*.log"))}
    if not found:
        raise StackError(
            f"there are no logs in {directory}: `weir up` writes them (--run-dir names another run)"
        )
    if name is not None and name not in found:
        raise StackError(f"there is no log of {name!r}{meant(name, found)}")
    return found if name is None else {name: found[name]}
