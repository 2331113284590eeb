"""Runs a service as a child process with a log of its own, and ends it with all of its descendants."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollout_queue.machine_memory import ending
from rollout_queue.private_file import append_private
from weir.errors import ServiceDied

LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 16 * 1024
KILLED_WITHIN_S = 5.0

Readiness = Callable[[], str | None]
"""Returns why a service is not ready; None when it is."""

Children = Mapping[int, Sequence[psutil.Process]]
"""The children of each process, by its id."""


def all_children() -> Children:
    """Reads the table of processes once, for all services."""
    found = defaultdict[int, list[psutil.Process]](list)
    for each in psutil.process_iter(["ppid"]):
        found[each.info["ppid"]].append(each)
    return found


@dataclass(frozen=True)
class Service:
    """What to start, where it listens, and how to ask whether it is ready."""

    name: str
    command: tuple[str, ...]
    ports: Mapping[int, str]
    """Every port that it listens on, with the setting that changes the port."""
    url: str
    ready: Readiness
    environment: Mapping[str, str] = field(default_factory=dict)


class ServiceProcess:
    """The process of a `Service`, in a Unix session of its own, so that Ctrl-C reaches only the parent."""

    def __init__(self, service: Service, log_path: Path) -> None:
        self.service = service
        self.log_path = log_path
        self.restarts = 0
        self._family: set[psutil.Process] = set()
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with append_private(self.log_path) as log:
            # The file may hold the log of an earlier process; `log_tail` begins here.
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                self.service.command,
                env=dict(self.service.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # what it writes are conversations, and weights that learned from them
            )
        self._family = {psutil.Process(self._popen.pid)}

    @property
    def pid(self) -> int:
        assert self._popen is not None, "not started"  # noqa: S101
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; None while it runs, 0 if it was never started."""
        return self._popen.poll() if self._popen else 0

    def check(self) -> None:
        """Raises ServiceDied, with the end of the log, when the process has ended."""
        if self.exit_code is None:
            return
        raise ServiceDied(
            f"{self.service.name} {ending(self.exit_code)}; the end of {self.log_path}:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it logged nothing)"

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the process, wait up to `timeout_s`, then kill it and its descendants."""
        if self._popen is None:
            return
        self.note_descendants(all_children())
        self._popen.terminate()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self.sweep()

    def sweep(self) -> None:
        """Kill the descendants of a service that has ended, because an engine without a parent would still
        hold its port."""
        self._family.update(self._session())
        for member in self._family:
            with suppress(psutil.NoSuchProcess):
                member.kill()  # psutil compares start times, so a reused pid is safe
        if self._popen is not None:
            self._popen.wait()  # before psutil waits, which would consume the exit code
        psutil.wait_procs(self._family, timeout=KILLED_WITHIN_S)

    def note_descendants(self, children: Children) -> None:
        """Note the process' descendants while it runs: once it has ended, its children have another parent,
        and those with a Unix session of their own cannot be told from others."""
        new = {member for member in self._family if member.is_running()}
        while new := {child for member in new for child in children.get(member.pid, ())} - self._family:
            self._family |= new

    def _session(self) -> Iterator[psutil.Process]:
        """The processes of the service's Unix session: also those that started after the last note."""
        if self._popen is None or self._pid_is_of_another():
            return
        for each in psutil.process_iter():
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(each.pid) == self._popen.pid:
                    yield each

    def _pid_is_of_another(self) -> bool:
        mine = {each for each in self._family if each.pid == self.pid}
        return psutil.pid_exists(self.pid) and not any(each.is_running() for each in mine)
