"""One host: a child process that runs environments, and the requests that wait for its answers.

runner ── a line of JSON on stdin ──▶ hosts/programs/serve.py ── a line of JSON on stdout ──▶ runner

An episode of serve.py has a process of its own there, which ends alone with HostDied. A host that dies, or
that does not answer in time, is killed with everything that it started; every episode that it runs then ends
with HostDied. The next request starts a new process.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from environments.errors import EnvironmentFault, HostDied
from environments.hosts.programs.answer_lines import MOST_LINE
from rollout_queue import clock

logger = logging.getLogger(__name__)

ERROR_LINES = 8
"""How many of the last lines that a host printed its end is told with."""
ENDS_AFTER_KILL_S = 10.0
KILLS_WITHIN_S = 10.0
"""How long a host may take to end the process of an episode."""
MARK = "WEIR_HOST"
"""A variable that a host leaves to everything that it starts, by which that is found and ended."""
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH")
NETWORK = re.compile(r"UV_\w+|SSL_CERT_\w+|(HTTPS?|ALL|NO)_PROXY", re.IGNORECASE)
"""How a library reaches the network, for instance to install an agent."""
SECRET = re.compile(r"PASSWORD|TOKEN|KEY|USERNAME", re.IGNORECASE)


class HostProcess:
    """Sends requests to a child process, many at a time, and starts it anew after its death."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        starts_within_s: float,
        ends_within_s: float,
        first: Mapping[str, Any] | None = None,
    ) -> None:
        """`ends_within_s` is how long the process may take to clean up when it is closed, in seconds. `first`
        is what each new process reads before any request."""
        self._first = first
        self._command, self._directory = command, directory
        self._starts_within_s, self._ends_within_s = starts_within_s, ends_within_s
        self._mark = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._printed: list[str] = []
        self._has_answered = False
        self._starting = asyncio.Lock()
        self.generation = 0
        """Counts the processes. An episode belongs to one of them."""

    async def start(self) -> None:
        """Start the process unless it runs. Raises HostDied."""
        async with self._starting:
            if self._process is None:
                await self._spawn()

    async def describe(self) -> dict[str, Any]:
        """What the environment says of itself. The process imports its library first, which takes a while."""
        described: dict[str, Any] = await self.ask("describe", within_s=self._starts_within_s)
        return described

    async def ask(
        self, do: str, episode: str | None = None, within_s: float | None = 60.0, **given: Any
    ) -> Any:
        """The answer to one request. Raises EnvironmentFault with the library's error, and HostDied."""
        if self._process is None or self._process.stdin is None:
            raise HostDied("the environment's process has ended")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        request = {"id": number, "do": do, "episode": episode, "with": given}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            async with clock.timeout(within_s):
                return await answer
        except TimeoutError:
            self.kill(f"the environment did not answer {do!r} within {within_s or 0:.0f} s")
            raise HostDied(f"the environment did not answer {do!r} within {within_s or 0:.0f} s") from None
        finally:
            self._waiting.pop(number, None)

    async def ask_process(self, do: str, episode: str | None, within_s: float, **given: Any) -> Any:
        """The answer of an episode's process in the host; without an episode, of the source's. What does not
        answer in time is ended alone. Raises as `ask`."""
        why = f"the environment did not answer {do!r} within {within_s:.0f} s"
        try:
            async with clock.timeout(within_s):
                return await self.ask(do, episode, None, **given)
        except TimeoutError:
            await self._end(episode, why)
            raise HostDied(why) from None

    async def _end(self, episode: str | None, why: str) -> None:
        """Have the host end what does not answer; end the host if that does not answer either."""
        logger.warning("an episode is ended: %s", why)
        try:
            async with clock.timeout(KILLS_WITHIN_S):
                await self.ask("kill", episode, None, why=why)
        except TimeoutError:
            self.kill(why)

    def tell(self, do: str, episode: str) -> None:
        """A request whose answer nobody needs."""
        if self._process is not None and self._process.stdin is not None:
            request = {"id": next(self._numbers), "do": do, "episode": episode}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def kill(self, why: str) -> None:
        """End the process and what it started. The requests that wait end with HostDied."""
        process, self._process = self._process, None
        if process is not None:
            logger.warning("host %d is killed: %s", process.pid, why)
            self._kill_all(process.pid)
            self._fail(why)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if self._has_answered and process.stdin is not None:  # else it imports, and hears nothing
                process.stdin.close()
                with contextlib.suppress(TimeoutError):
                    async with clock.timeout(self._ends_within_s):
                        await process.wait()
            self._kill_all(process.pid)
            with contextlib.suppress(TimeoutError):  # who has inherited its pipes keeps them open
                async with clock.timeout(ENDS_AFTER_KILL_S):
                    await process.wait()
            self._fail("the environment's process was closed")
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _spawn(self) -> None:
        self._printed.clear()
        self._has_answered = False
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._directory,
                env=inherited(os.environ) | {MARK: self._mark},
                limit=MOST_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise HostDied(f"the environment's process cannot be started: {error}") from None
        self._process = process
        self.generation += 1
        if self._first is not None and process.stdin is not None:
            process.stdin.write(json.dumps(self._first).encode() + b"\n")
        self._readers = [asyncio.create_task(self._answers(process)), asyncio.create_task(self._log(process))]

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101
        with contextlib.suppress(ValueError):  # an answer beyond MOST_LINE
            while line := await process.stdout.readline():
                try:
                    said = json.loads(line)
                    self._answer(said["id"], said)
                except (ValueError, KeyError, TypeError, RecursionError):
                    break
        if self._process is process:
            self._kill_all(process.pid)
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(ENDS_AFTER_KILL_S):
                    await process.wait()
            code = process.returncode
            self._process = None
            printed = " / ".join(self._printed[-ERROR_LINES:]) or "it printed nothing"
            self._fail(f"the environment's process ended with {code}: {printed}")

    def _answer(self, number: int, said: Mapping[str, Any]) -> None:
        self._has_answered = True
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if "ended" in said:
            waiting.set_exception(HostDied(str(said["ended"])))
        elif "error" in said:
            waiting.set_exception(EnvironmentFault(str(said["error"])))
        else:
            waiting.set_result(said["ok"])

    def _fail(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(HostDied(why))

    def _kill_all(self, pid: int) -> None:
        """Kill the process with its group, and what it started in groups of their own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    process.kill()

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None  # noqa: S101
        while chunk := await process.stderr.read(65536):
            lines = chunk.decode(errors="replace").splitlines()
            self._printed = [*self._printed, *lines][-ERROR_LINES:]
            for line in lines[-ERROR_LINES:]:
                logger.debug("host %d: %s", process.pid, line[:500])


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a host gets: no keys of Weir or of others."""
    return {
        name: value
        for name, value in environment.items()
        if name in INHERITED or (NETWORK.fullmatch(name) and not SECRET.search(name))
    } | {"PYTHONUNBUFFERED": "1"}
