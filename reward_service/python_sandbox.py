"""Runs Python graders: one process for each call, and a bounded number of them at once.

PythonProcesses.grade ── source, sample, item ─▶ sandbox_child ── a number, null or an error ─▶ PythonResult
               .check ── source ──────────────▶ sandbox_child ── null or an error ───────────▶ PythonResult

At the start it finds out whether they can be isolated, which is whether the system grants namespaces, and
keeps the service's memory and environment from the processes that it starts.
"""

import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from reward_service.sandbox_child import NOT_ISOLATED
from rollout_queue import clock
from rollout_queue.foreign_json import read_json
from rollout_queue.settings import BOUND, SettingsPart


class PythonSettings(SettingsPart):
    """Limits of each process that runs a Python grader, and of their number."""

    interpreter: str | None = None
    """The Python whose libraries the graders may import; null means the service's own."""
    processes: int = Field(4, ge=1)
    """How many run at once; further ones wait."""
    timeout_s: float = Field(30.0, gt=0)
    """How long one call of a grader may take."""
    memory_bytes: int = Field(2**30, ge=2**26)
    """The memory of one process."""
    file_bytes: Annotated[int, BOUND] = Field(2**26, ge=0)
    """The largest file that a grader may write."""
    isolation: Literal["auto", "required"] = "auto"
    """auto: graders have no network, and see no process of the machine, where the system grants namespaces.
    required: where it does not, a Python grader fails."""
    from_clients: bool = False
    """Whether requests with a client key may bring Python graders. An admin's requests may. Then isolation is
    required, and the service does not start without it."""

    @property
    def required(self) -> bool:
        """Whether a grader that cannot be isolated fails."""
        return self.isolation == "required" or self.from_clients


logger = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("sandbox_child.py")
ANSWER_BYTES = 2**16
CHUNK_BYTES = 2**16
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # A grader may start no threads, and these libraries otherwise do when they are imported.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All variables of a grader's process, besides HOME and TMPDIR."""


@dataclass(frozen=True)
class PythonResult:
    """What became of one call of `grade`."""

    value: float | None = None
    """What `grade` returned: a finite number, or None."""
    error: str | None = None
    """What the source did wrong: it raised, or returned something else."""
    ended: str | None = None
    """Why there is no answer: `timeout`, `killed`, `exited`, `not_started`, `no_isolation`,
    `answer_too_large`."""


class PythonChildAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What the process writes."""

    value: float | None = None
    error: str | None = None


class PythonProcesses:
    """The processes of all Python graders of a service."""

    def __init__(self, settings: PythonSettings) -> None:
        self._settings = settings
        self._free = asyncio.Semaphore(settings.processes)
        self.running = 0

    async def grade(
        self, source: str, sample: Mapping[str, Any], item: Any, timeout_s: float | None = None
    ) -> PythonResult:
        """Call the source's `grade(sample, item)`. The time to wait for a free process does not count."""
        return await self._answer({"source": source, "sample": sample, "item": item}, timeout_s)

    async def check(self, source: str) -> PythonResult:
        """Load the source, and look whether it has a function `grade(sample, item)`, which is not called."""
        return await self._answer({"source": source}, None)

    async def _answer(self, asked: Mapping[str, Any], timeout_s: float | None) -> PythonResult:
        limit_s = min(timeout_s or math.inf, self._settings.timeout_s)
        given = json.dumps(asked).encode()
        async with self._free:
            self.running += 1
            try:
                return await self._run(given, limit_s)
            finally:
                self.running -= 1

    async def _run(self, given: bytes, limit_s: float) -> PythonResult:
        with tempfile.TemporaryDirectory(prefix="weir-grader-", ignore_cleanup_errors=True) as directory:
            began = clock.monotonic()
            try:
                process = await self._start(directory, limit_s)
            except OSError as error:  # no such interpreter, or no memory for a process
                logger.error("a Python grader cannot be started: %s", error)
                return PythonResult(ended="not_started")
            try:
                async with clock.timeout(limit_s):
                    answer = await _exchange(process, given)
                    await process.wait()
            except TimeoutError:
                return PythonResult(ended="timeout")
            finally:
                await _end(process)
        result = _result_of(answer, process.returncode)
        if result.ended == "killed" and clock.monotonic() - began > limit_s:
            return PythonResult(ended="timeout")  # this process was late, and the limit of CPU time was not
        return result

    async def _start(self, directory: str, limit_s: float) -> Process:
        limits = {
            "cpu_s": math.ceil(limit_s) + 1,
            "memory_bytes": self._settings.memory_bytes,
            "file_bytes": self._settings.file_bytes,
            "isolation": "required" if self._settings.required else "auto",
        }
        return await asyncio.create_subprocess_exec(
            self._settings.interpreter or sys.executable,
            "-I",  # neither the environment nor the directory adds modules
            "-B",
            str(CHILD),
            json.dumps(limits),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=directory,
            env=ENVIRONMENT | {"HOME": directory, "TMPDIR": directory},
            start_new_session=True,
        )


async def _exchange(process: Process, given: bytes) -> bytes:
    """Write what is given, and read the answer; what the grader prints is read and dropped."""
    writer, stdout, stderr = process.stdin, process.stdout, process.stderr
    if writer is None or stdout is None or stderr is None:
        raise RuntimeError("a grader's process has pipes")

    async def feed() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended before it read everything
            writer.write(given)
            await writer.drain()
        writer.close()

    async def drop() -> None:
        while await stderr.read(CHUNK_BYTES):
            pass

    dropping = asyncio.create_task(drop())
    feeding = asyncio.create_task(feed())
    try:
        answer = b""
        while len(answer) <= ANSWER_BYTES and (chunk := await stdout.read(CHUNK_BYTES)):
            answer += chunk
        return answer
    finally:
        for task in (feeding, dropping):
            task.cancel()
        await asyncio.gather(feeding, dropping, return_exceptions=True)


async def _end(process: Process) -> None:
    """Kill whatever is left of the process group, and wait for the process."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _result_of(answer: bytes, status: int | None) -> PythonResult:
    if len(answer) > ANSWER_BYTES:
        return PythonResult(ended="answer_too_large")
    if status == NOT_ISOLATED and not answer:
        return PythonResult(ended="no_isolation")
    try:
        read = read_json(answer, PythonChildAnswer)
    except msgspec.DecodeError:
        # A signal in the grader's own namespace ends its parent with 256 - signal.
        killed = status is not None and (status < 0 or status >= 128)
        return PythonResult(ended="killed" if killed else "exited")
    return PythonResult(read.value, read.error)


STARTS_WITHIN_S = 60.0
GIVEN: Final[dict[str, object]] = {
    "source": "def grade(sample, item): return 1.0",
    "sample": {},
    "item": None,
}
WITHOUT = "the system grants no namespaces, so Python graders would have the network and see other processes"


def isolates(settings: PythonSettings, section: str) -> bool:
    """Whether graders are isolated. Logs it once if they are not. `section`: of the configuration.

    Raises SystemExit if clients may bring graders that would not be isolated.
    """
    found = _tried(settings)
    if not found and settings.from_clients:
        raise SystemExit(
            f"{section}.python.from_clients: {WITHOUT}; unset it, or grant namespaces to the service"
        )
    if not found:
        logger.warning("%s.python.isolation: %s", section, WITHOUT)
    return found


def _tried(settings: PythonSettings) -> bool:
    """Whether a grader that does nothing runs isolated."""
    limits = {
        "cpu_s": int(STARTS_WITHIN_S),
        "memory_bytes": settings.memory_bytes,
        "file_bytes": settings.file_bytes,
        "isolation": "required",
    }
    command = [settings.interpreter or sys.executable, "-I", "-B", str(CHILD), json.dumps(limits)]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(GIVEN).encode(),
            capture_output=True,
            env=ENVIRONMENT,
            timeout=STARTS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


PR_SET_DUMPABLE = 4


def hide_from_children() -> None:
    """From now on no process of the same user can read this process's memory, or its environment in /proc."""
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        logger.warning("graders may be able to read this process's environment: the system hides it not")
