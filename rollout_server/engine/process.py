"""The engine's operating-system process: started in a process group of its own, and ended as a group."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from rollout_queue import clock
from rollout_server.engine.left_memory import LeftMemory

logger = logging.getLogger(__name__)

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
    """Open a new log, to append (`engine_log.py`). The former log is kept beside it, because it tells why the
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
