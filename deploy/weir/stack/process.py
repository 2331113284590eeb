"""One service as a child process: its own session, its own log, and an end that leaves nothing behind."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from weir.errors import ServiceDied

LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 16 * 1024
KILLED_WITHIN_S = 5.0

Readiness = Callable[[], str | None]
"""Says why a service cannot do its work; None when it can."""


@dataclass(frozen=True)
class Service:
    """What to start, where it listens, and how to tell that it can do its work."""

    name: str
    command: tuple[str, ...]
    ports: Mapping[int, str]
    """Every port that it listens on → the setting that moves it."""
    url: str
    ready: Readiness
    environment: Mapping[str, str] = field(default_factory=dict)


class ServiceProcess:
    """A running `Service`. It leads a session of its own, so that Ctrl-C reaches only the parent."""

    def __init__(self, service: Service, log_path: Path) -> None:
        self.service = service
        self.log_path = log_path
        self.restarts = 0
        self._family: set[psutil.Process] = set()
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            # The log of an earlier life stays above; the tail that an error quotes begins here.
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                self.service.command,
                env=dict(self.service.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family = {psutil.Process(self._popen.pid)}

    @property
    def pid(self) -> int:
        assert self._popen is not None, "not started"  # noqa: S101
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll() if self._popen else 0

    def check(self) -> None:
        """Raises ServiceDied when it has ended, with the end of its log; else notes its descendants."""
        if self.exit_code is None:
            self._note_family()
            return
        raise ServiceDied(
            f"{self.service.name} {_how(self.exit_code)}; the end of {self.log_path}:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, a while to drain, then SIGKILL to whatever is left of it and of its descendants."""
        if self._popen is None:
            return
        self._note_family()
        self._popen.terminate()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        self.sweep()

    def sweep(self) -> None:
        """Kills what a dead service left behind: an engine whose parent was killed still holds its port."""
        for member in self._family:
            with suppress(psutil.NoSuchProcess):
                member.kill()  # psutil compares start times, so that a reused pid is never hit
        if self._popen is not None:
            self._popen.wait()  # before psutil does, which would take the exit code away from it
        psutil.wait_procs(self._family, timeout=KILLED_WITHIN_S)

    def _note_family(self) -> None:
        # A dead parent's children have a new parent, so they are noted while it lives.
        for member in list(self._family):
            try:
                self._family.update(member.children(recursive=True))
            except psutil.NoSuchProcess:
                continue


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
