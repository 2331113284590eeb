"""Stops the services that `weir up` started, from another process, and also if their parent has died."""

import signal
from contextlib import suppress
from pathlib import Path

import psutil

from weir.stack import state
from weir.stack.state import StackState


def stop(run_dir: Path, timeout_s: float) -> list[str]:
    """Tell the parent to stop its services, then stop those that still run. Returns a sentence per action."""
    found = state.read(run_dir)
    if found is None or found.phase == "failed":
        state.path_in(run_dir).unlink(missing_ok=True)
        return [f"no services run in {run_dir}"]
    done = [_stop_parent(found, timeout_s)]
    for name, service in reversed(found.services.items()):
        process = service.process()
        if process is not None:
            _stop_tree(process, timeout_s)
            done.append(f"{name} (pid {service.pid}) was still running and is stopped")
    state.path_in(run_dir).unlink(missing_ok=True)
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
