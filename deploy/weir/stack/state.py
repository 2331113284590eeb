"""What runs, as {run_dir}/stack.json: for `weir status`, for `weir down`, and after a crash of the parent."""

from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import BaseModel

from weir.errors import StackError
from weir.stack.services import write_private

Phase = Literal["starting", "up", "failed"]
START_TIME_SLACK_S = 1.0


class ProcessState(BaseModel):
    """One process, named so that a later one with the same pid is not mistaken for it."""

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
        """The running process, if it is still the one that was written down."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started_at) < START_TIME_SLACK_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class StackState(BaseModel):
    """The parent, its services in the order of dependence, and how far they are."""

    parent: ProcessState
    phase: Phase = "starting"
    detail: str = ""
    """What is waited for while starting; what went wrong when failed."""
    services: dict[str, ProcessState] = {}

    def running(self) -> list[str]:
        """The services that still run, whether or not their parent does."""
        return [name for name, service in self.services.items() if service.process()]

    def write(self, run_dir: Path) -> None:
        write_private(path_in(run_dir), self.model_dump_json(indent=2))


def path_in(run_dir: Path) -> Path:
    return run_dir / "stack.json"


def read(run_dir: Path) -> StackState | None:
    """None when nothing was started in this run directory, or it was stopped."""
    try:
        return StackState.model_validate_json(path_in(run_dir).read_bytes())
    except FileNotFoundError:
        return None


def refuse_in_use(run_dir: Path) -> None:
    """Raises StackError when a stack, or what one left behind, runs in this directory."""
    found = read(run_dir)
    if found and found.parent.process():
        raise StackError(
            f"{run_dir} is in use by pid {found.parent.pid}: stop it with "
            f"`weir down --run-dir {run_dir}`, or set another run directory"
        )
    if found and (left := found.running()):
        names = ", ".join(left)
        raise StackError(f"{names} of an earlier run still run: `weir down --run-dir {run_dir}` stops them")
