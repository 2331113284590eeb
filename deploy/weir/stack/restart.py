"""`weir restart SERVICE`: ends one service, which its supervisor starts again."""

from collections.abc import Callable

import psutil

from rollout_queue import clock
from rollout_queue.config_file import meant
from weir.errors import StackError
from weir.stack import state
from weir.stack.probes import ready_of
from weir.stack.settings import StackSettings
from weir.stack.state import ProcessState, StackState

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
    found: StackState | None = state.read(settings.run_dir)
    if found is None or found.parent.process() is None:
        raise StackError(
            f"no `weir up` runs in {settings.run_dir}, which would start a service again: start all with "
            "`weir up`, or name the directory of another run (--run-dir)"
        )
    if name not in found.services:
        raise StackError(f"there is no service {name!r} in {settings.run_dir}{meant(name, found.services)}")
    return found.services[name]
