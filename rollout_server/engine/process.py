"""The engine's operating-system process: started in a process group of its own, and ended as a group; and
what it leaves, its log and its shared memory.

SGLang's schedulers tell their loads in a file in /dev/shm. An engine that is killed cannot remove it, and
the memory that it takes would be lost until the machine restarts. The names are noted in a file beside the
log, so that a rollout server which was killed together with its engine removes them when it starts again.

The log is a file of bounded size. It may be copied to this service's own output:

engine ── appends ─▶ engine.log ──┬─ larger than the bound ─▶ engine.log.1, and engine.log begins anew
                                  └─ copied, if asked for ──▶ standard output (`docker logs`)
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rollout_queue import clock

logger = logging.getLogger(__name__)

SHARED, PREFIX = "/dev/shm/", "sglang_loads_"  # noqa: S108 - SGLang's own names
PROC = Path("/proc")


class LeftMemory:
    """The shared files of one engine, over all of its starts."""

    def __init__(self, note: Path) -> None:
        """`note` is the file that keeps their names."""
        self._note = note

    def note(self, group: int) -> None:
        """Note the files that the processes of this group have open, as far as they can be read."""
        with contextlib.suppress(OSError):
            found = {*self._noted(), *_open_in_group(group)}
            if found - {*self._noted()}:
                self._note.write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove the noted files; no process of the engine may run any more."""
        for name in self._noted():
            with contextlib.suppress(OSError):
                Path(name).unlink()
                logger.info("removed %s, which an engine had left", name)
        with contextlib.suppress(OSError):
            self._note.unlink(missing_ok=True)

    def _noted(self) -> list[str]:
        try:
            lines = self._note.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        return [line for line in lines if _is_ours(line)]


def _is_ours(name: str) -> bool:
    return name.startswith(f"{SHARED}{PREFIX}") and "/" not in name.removeprefix(SHARED)


def _open_in_group(group: int) -> Iterator[str]:
    """The files of SGLang's loads that processes of the group have mapped or opened."""
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            for line in (process / "maps").read_text().splitlines():
                name = line.partition("/")[1] + line.partition("/")[2]
                if _is_ours(name):
                    yield name
            for link in (process / "fd").iterdir():
                name = str(link.readlink())
                if _is_ours(name):
                    yield name


POLL_S = 0.5
MOST_COPIED = 2**20
"""Bytes that one poll copies at most, so that a flood of lines does not hold up the service."""


class EngineLog:
    """The file that every run of the engine appends to. The former run's is kept beside it, as `.1`."""

    def __init__(self, path: Path, most_bytes: int, copy: BinaryIO | None = None) -> None:
        self._path = path
        self._former = path.with_name(f"{path.name}.1")
        self._most_bytes = most_bytes
        self._copy = copy
        self._copied = 0
        self._file = 0
        """Bytes of the file with this inode number that were copied."""
        self._former_file = inode_of(self._former)
        """The former log that needs no more copying."""

    async def keep(self) -> None:
        """Copy what is new, and bound the file."""
        await asyncio.to_thread(self._keep)

    def _keep(self) -> None:
        if not (inode := inode_of(self._path)):  # no engine has started
            return
        with self._path.open("r+b") as log:
            if inode != self._file:
                self._copy_former()
                self._copied, self._file = 0, inode
            self._copied += self._copy_from(log)
            if log.seek(0, 2) > self._most_bytes:
                # The engine has opened the file to append, so it goes on at the new end. What it writes
                # between these two lines is lost.
                self._tell_left_out(log)
                shutil.copyfile(self._path, self._former)
                log.truncate(0)
                self._copied = 0
                self._former_file = inode_of(self._former)

    def _copy_former(self) -> None:
        """Copy what the former run wrote at its end, or all of it if it ended before its log was read."""
        former = inode_of(self._former)
        if former == self._former_file:
            return
        if former != self._file:
            self._copied = 0
        with self._former.open("rb") as log:
            self._copied += self._copy_from(log)
            self._tell_left_out(log)
        self._former_file = former

    def _tell_left_out(self, log: BinaryIO) -> None:
        """Say in the copy how many bytes it lacks; they are in the former log."""
        left_out = log.seek(0, 2) - self._copied
        if self._copy is not None and left_out > 0:
            self._copy.write(b"[%d bytes of the engine's log are left out here]\n" % left_out)
            self._copy.flush()

    def _copy_from(self, log: BinaryIO) -> int:
        if self._copy is None:
            return 0
        log.seek(self._copied)
        piece = log.read(MOST_COPIED)
        self._copy.write(piece)
        self._copy.flush()
        return len(piece)


def inode_of(path: Path) -> int:
    """The inode number of a file; 0 if there is no file."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


TETHER = Path(__file__).with_name("tether.py")
LOG_TAIL_BYTES = 4000


class EngineProcess:
    """One run of SGLang, with its children."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        log_path: Path,
        stop_timeout_s: float,
        left_memory: LeftMemory,
    ) -> None:
        self._process = process
        self._left_memory = left_memory
        self._log_path = log_path
        self._stop_timeout_s = stop_timeout_s

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log_path: Path, stop_timeout_s: float
    ) -> "EngineProcess":
        tether = (sys.executable, "-IS", str(TETHER), str(os.getpid()))
        left_memory = LeftMemory(log_path.with_suffix(".shm"))
        left_memory.remove()
        with _new_log(log_path) as log:
            process = await asyncio.create_subprocess_exec(
                *tether,
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        logger.info("engine process %d started: %s", process.pid, " ".join(command))
        return cls(process, log_path, stop_timeout_s, left_memory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        return await self._process.wait()

    async def kill(self) -> None:
        """End the whole group at once. Otherwise SGLang's scheduler would keep the port and the memory."""
        self.note_memory()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        self._left_memory.remove()

    def note_memory(self) -> None:
        """Note the engine's files in shared memory."""
        self._left_memory.note(self.pid)

    async def stop(self) -> None:
        """Let the engine finish its requests, at most `stop_timeout_s`; then `kill`."""
        if not self.exited:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(self._stop_timeout_s):
                    await self._process.wait()
        await self.kill()

    def log_tail(self) -> str:
        """The end of the engine's log, which tells why it died."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
        return ""


def _new_log(path: Path) -> BinaryIO:
    """Open a new log, to append. The former log is kept beside it, because it tells why the
    former engine died."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")


def port_in_use(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
