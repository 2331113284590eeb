"""The state of the stack in {run_dir}/stack.json, for `weir status` and `weir down`."""

from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import BaseModel, ValidationError

from rollout_queue.private_file import make_private_directory, write_private
from weir.errors import StackError

Phase = Literal["starting", "up", "failed"]
START_TIME_SLACK_S = 1.0


class ProcessState(BaseModel):
    """One process. A later process with the same pid has another start time."""

    pid: int
    started_at: float
    url: str = ""
    log: str = ""
    restarts: int = 0

    @classmethod
    def of(cls, pid: int, url: str = "", log: str = "", restarts: int = 0) -> Self:
        try:
            started_at = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            started_at = 0.0
        return cls(pid=pid, started_at=started_at, url=url, log=log, restarts=restarts)

    def process(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started_at) < START_TIME_SLACK_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class StackState(BaseModel):
    """The parent process, its services in the order of their start, and the phase of the start."""

    parent: ProcessState
    phase: Phase = "starting"
    detail: str = ""
    """While starting: which services are not ready, and why. After a failure: the reason."""
    services: dict[str, ProcessState] = {}

    @property
    def gateway_url(self) -> str | None:
        """None if no gateway was started."""
        service = self.services.get("gateway")
        return None if service is None else service.url

    @property
    def urls(self) -> dict[str, str]:
        """The addresses of the services, by name."""
        return {name: service.url for name, service in self.services.items()}

    def running(self) -> list[str]:
        """The names of the services that still run, even if their parent has ended."""
        return [name for name, service in self.services.items() if service.process()]

    def write(self, run_dir: Path) -> None:
        write_private(path_in(run_dir), self.model_dump_json(indent=2))


def path_in(run_dir: Path) -> Path:
    return run_dir / "stack.json"


def read(run_dir: Path) -> StackState | None:
    """The stored state; None if nothing was started in this directory, or everything was stopped. Raises
    StackError."""
    path = path_in(run_dir)
    try:
        return StackState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        why = "it is not whole; stop what runs, and remove it"
        if isinstance(error, OSError):
            why = f"{error.strerror}; name the directory of a run (--run-dir, WEIR_STACK__RUN_DIR)"
        raise StackError(f"{path} cannot be read: {why}") from error


def own_run_dir(run_dir: Path) -> None:
    """Make the directory; it has conversations and keys, so only its owner may read it. Raises StackError."""
    try:
        make_private_directory(run_dir)
    except OSError as error:
        raise StackError(
            f"{run_dir} cannot be a run directory, which only you may read: {error.strerror or error}; "
            "set another one (--run-dir, WEIR_STACK__RUN_DIR)"
        ) from error


def refuse_in_use(run_dir: Path) -> None:
    """Raises StackError if a stack runs in this directory, or services run that an earlier stack left."""
    found = read(run_dir)
    if found and found.parent.process():
        raise StackError(
            f"{run_dir} is in use by pid {found.parent.pid}: stop it with "
            f"`weir down --run-dir {run_dir}`, or set another run directory"
        )
    if found and (left := found.running()):
        names = ", ".join(left)
        raise StackError(
            f"services of an earlier run still run: {names}; stop them with `weir down --run-dir {run_dir}`"
        )
