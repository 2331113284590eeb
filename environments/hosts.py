"""Hosts: child processes in which the Pythons of libraries run environments, and pools of them.

runner ── a line of JSON on stdin ──▶ programs/serve.py ── a line of JSON on stdout ──▶ runner

HostPool ──┬─ HostedEnvironments   environments that an agent loop plays, each in a process of its own
           └─ HostedLibrary        a library that plays whole episodes itself

Each new episode goes to the host that runs the fewest. An episode of serve.py has a process of its own there,
which ends alone with HostDied. A host that dies, or that does not answer in time, is killed with everything
that it started; every episode that it runs then ends with HostDied. The next request starts a new process.
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
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from environments.environment import Description, Environment, Step, Task
from environments.errors import EnvironmentFault, HostDied, UnknownEnvironment
from environments.programs.host_answers import MOST_LINE
from environments.task_ids import task_id
from rollout_queue import clock

PROGRAMS = Path(__file__).parent / "programs"
_INSTALLER = "weir install {1}" if PROGRAMS.parents[1].name == "_services" else "make {0}/{1}/installed"
"""What installs a library: in a wheel, the services are in the folder `_services`."""
WRAPPERS = {
    "python": "python_class",
    "gymnasium": "with_gymnasium",
    "reasoning_gym": "with_reasoning_gym",
    "textarena": "with_textarena",
    "verifiers": "with_verifiers",
    "verifiers_v0": "with_verifiers_v0",
}
PLAY_THEMSELVES = ("verifiers", "verifiers_v0")
"""The libraries that play whole episodes."""


def host_command(library: str, name: str, python: Path | None, environments_dir: Path) -> list[str]:
    """The command of a host. `python` is the user's choice of interpreter; without it, a library has the one
    in `environments_dir`, and a class of the user runs with this one."""
    if library not in WRAPPERS:
        known = ", ".join(sorted([*WRAPPERS, "openenv"]))
        raise UnknownEnvironment(f"there are no environments of {library!r}, only of {known}")
    interpreter = python or _interpreter(library, environments_dir)
    program = PROGRAMS / ("play.py" if library in PLAY_THEMSELVES else "serve.py")
    return [str(interpreter), str(program), WRAPPERS[library], name]


def tools_command(environments_dir: Path) -> list[str]:
    """The command of the host that calls the tools of MCP servers."""
    return [str(_interpreter("mcp", environments_dir)), str(PROGRAMS / "tool_servers.py")]


def _interpreter(library: str, environments_dir: Path) -> Path:
    if library == "python":
        return Path(sys.executable)
    found = environments_dir / library / "bin" / "python"
    if not found.exists():
        raise UnknownEnvironment(
            f"{library} is not installed: run `{_INSTALLER.format(environments_dir, library)}`, "
            "or name an interpreter that has it: --set python=PATH"
        )
    return found.absolute()  # a host may start in another directory


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


STARTS_WITHIN_S = 120.0
CLOSES_WITHIN_S = 10.0
"""How long the process of an episode may take to end, whose step may still be under way."""
ENDS_WITHIN_S = 20.0
"""How long a host may take to end what it has started."""
SPARE_S = 10.0
TASK_ATTEMPTS = 3


class HostPool:
    """`count` host processes, and the tasks that they know. `step_s` is how long one request may take, in
    seconds. `options` are what the environment is made with."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        count: int,
        step_s: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        first = dict(options or {})
        self._hosts = [
            HostProcess(command, directory, STARTS_WITHIN_S, ENDS_WITHIN_S, first) for _ in range(count)
        ]
        self._running = dict.fromkeys(range(count), 0)
        self._numbers = itertools.count()
        self._step_s = step_s
        self._description: Description | None = None

    @property
    def description(self) -> Description:
        if self._description is None:
            raise RuntimeError("the hosts have not been started")
        return self._description

    async def __aenter__(self) -> Self:
        """Start the hosts. Raises UnknownEnvironment with what the first one printed."""
        try:
            await asyncio.gather(*(host.start() for host in self._hosts))
            described = await asyncio.gather(*(host.describe() for host in self._hosts))
        except EnvironmentFault as error:
            await self.__aexit__()
            raise UnknownEnvironment(str(error)) from None
        self._description = msgspec.convert(described[0], Description, strict=False)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        """A host that dies meanwhile, because of an episode for instance, is replaced. Raises
        EnvironmentFault."""
        host = self.ready(0)
        for left in reversed(range(TASK_ATTEMPTS)):
            try:
                await host.start()
                given = await host.ask_process(
                    "tasks", None, STARTS_WITHIN_S, seed=seed, start=start, count=count
                )
                break
            except HostDied:
                if not left:
                    raise
        return [Task(task_id(self.description.name, each["id"]), each["data"]) for each in given]

    def take(self) -> tuple[int, str]:
        """The number of the host for a new episode, and the episode's name there."""
        number = min(self._running, key=lambda each: self._running[each])
        self._running[number] += 1
        return number, str(next(self._numbers))

    def ready(self, number: int) -> HostProcess:
        return self._hosts[number]

    def left(self, number: int) -> None:
        self._running[number] -= 1


class HostedEnvironments(HostPool):
    """Environments that an agent loop plays."""

    def environment(self) -> Environment:
        return HostedEnvironment(self, *self.take(), self._step_s)


class HostedEnvironment:
    """One episode's environment, in a process of its own in a host."""

    def __init__(self, pool: HostPool, number: int, episode: str, step_s: float) -> None:
        self._pool, self._number, self._episode, self._step_s = pool, number, episode, step_s
        self._host = pool.ready(number)
        self._generation: int | None = None

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._pool.description.tools

    async def reset(self, task: Task) -> Step:
        await self._host.start()
        self._generation = self._host.generation
        return await self._step("reset", STARTS_WITHIN_S, data=task.data)

    async def step(self, answer: str) -> Step:
        return await self._step("step", answer=answer)

    async def call(self, name: str, arguments: str) -> Step:
        return await self._step("call", name=name, arguments=arguments)

    async def close(self) -> None:
        """Returns once the episode's process has ended, so that no more of them run than episodes."""
        self._pool.left(self._number)
        if self._generation == self._host.generation:
            with suppress(EnvironmentFault):  # the host ends what does not end itself
                grace_s = CLOSES_WITHIN_S
                await self._host.ask("close", self._episode, grace_s + SPARE_S, grace_s=grace_s)

    async def _step(self, do: str, within_s: float | None = None, **given: Any) -> Step:
        said = await self._ask(do, within_s, **given)
        try:
            return msgspec.convert(said, Step, strict=False)
        except msgspec.ValidationError as error:
            raise EnvironmentFault(f"the environment's answer to {do!r} is malformed: {error}") from None

    async def _ask(self, do: str, within_s: float | None = None, **given: Any) -> Any:
        if self._generation != self._host.generation:
            raise HostDied("the environment's process has ended")
        return await self._host.ask_process(do, self._episode, within_s or self._step_s, **given)


class HostedLibrary(HostPool):
    """A library that plays whole episodes itself, many side by side in one host."""

    async def play(self, **given: Any) -> Any:
        """What became of an episode. Who is cancelled meanwhile cancels it in the library, too.

        An episode may take as long as it likes, but its host has to answer within `step_s`: an episode that
        holds the others up is ended, and a host where that does not help is killed. Raises EnvironmentFault
        with the library's error, and HostDied.
        """
        number, episode = self.take()
        host = self.ready(number)
        try:
            await host.start()
            await host.ask("ping", within_s=STARTS_WITHIN_S)  # a new host imports its library first
            async with self._watched(host):
                return await host.ask("play", episode, within_s=None, **given)
        except asyncio.CancelledError:
            host.tell("cancel", episode)
            raise
        finally:
            self.left(number)

    @asynccontextmanager
    async def _watched(self, host: HostProcess) -> AsyncIterator[None]:
        """Ask the host from time to time whether it lives."""
        watching = asyncio.create_task(self._watch(host))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, host: HostProcess) -> None:
        while True:
            await clock.sleep(self._step_s)
            with suppress(HostDied):  # an episode has ended, or all of the host
                await host.ask_process("ping", None, self._step_s)
