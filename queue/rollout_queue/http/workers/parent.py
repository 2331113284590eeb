"""Runs a service as several workers until SIGTERM, and starts a worker again when it ends or hangs.

parent ──starts──▶ worker 0, worker 1, …     each listens on a socket of its own at the same address
   └── asks each worker for /live over its Unix socket; SIGTERM and SIGHUP are passed on
"""

import asyncio
import logging
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollout_queue import clock
from rollout_queue.http.workers.siblings import SILENT_S, Siblings
from rollout_queue.http.workers.worker import Worker, bound_sockets, unix_socket

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5
MAX_EARLY_ENDS = 5
"""If a worker ends this often in a row before it answers, the whole service ends with an error."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""The pause before a worker is started again doubles as long as it ends before it answers."""

Command = Callable[[Worker], Sequence[str]]
"""The command line of a worker."""


def run_workers(count: int, host: str, port: int, command: Command, stop_within_s: float) -> int:
    """Run `count` workers until SIGTERM. Returns the exit status: 0, or 1 if the workers do not start.

    Workers that still run `stop_within_s` after SIGTERM are killed. Raises OSError if the address is taken.
    """
    for each in bound_sockets(host, port, shared=False):  # fails if any other process has the address
        each.close()
    reserved = bound_sockets(host, port, shared=True)  # it does not listen, so it gets no connections
    try:
        with tempfile.TemporaryDirectory(prefix="weir-workers-") as folder:
            return asyncio.run(_Parent(count, Path(folder), command, stop_within_s).run())
    finally:
        for each in reserved:
            each.close()


class _Parent:
    def __init__(self, count: int, folder: Path, command: Command, stop_within_s: float) -> None:
        self._count, self._folder = count, folder
        self._command = command
        self._stop_within_s = stop_within_s
        self._processes: dict[int, Process] = {}
        self._answered: set[int] = set()
        """The workers that run and have answered."""
        self._missed: set[int] = set()
        """The workers that were starting when a SIGHUP came."""
        self._leaving = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._leave)
        loop.add_signal_handler(signal.SIGHUP, self._pass_hangup_on)
        await asyncio.gather(*(self._keep(number) for number in range(self._count)))
        return self._status

    async def _keep(self, number: int) -> None:
        """Run the worker, again and again, until the service leaves."""
        early = 0
        while not self._leaving.is_set():
            code = await self._run(number)
            if self._leaving.is_set():
                return
            early = 0 if number in self._answered else early + 1
            logger.error("worker %d ended with status %d and is started again", number, code)
            if early == MAX_EARLY_ENDS:
                logger.error("worker %d ended %d times before it answered: the service ends", number, early)
                self._status = 1
                self._leave()
                return
            pause_s = min(FIRST_PAUSE_S * 2**early, LONGEST_PAUSE_S)
            with suppress(TimeoutError):
                async with clock.timeout(pause_s):
                    await self._leaving.wait()

    async def _run(self, number: int) -> int:
        """Run the worker once. Returns its exit status."""
        self._answered.discard(number)
        self._missed.discard(number)
        unix_socket(self._folder, number).unlink(missing_ok=True)  # of a worker that was killed
        worker = Worker(number, self._count, self._folder)
        process = await asyncio.create_subprocess_exec(*self._command(worker), stdin=PIPE)
        self._processes[number] = process
        if self._leaving.is_set():  # SIGTERM came while the process was being started
            _send(process, signal.SIGTERM)
        watching = asyncio.create_task(self._watch(number, process))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            del self._processes[number]

    async def _watch(self, number: int, process: Process) -> None:
        """Ask the worker whether it lives. Kill it if it no longer answers, or does not stop in time."""
        siblings = Siblings(self._folder, [number])
        heard_at: float | None = None
        """When the worker began to listen, or last answered; None while it starts."""
        try:
            while not self._leaving.is_set():
                await clock.sleep(PROBE_EVERY_S)
                if not unix_socket(self._folder, number).exists():
                    continue  # it starts
                heard_at = heard_at or clock.monotonic()
                if await siblings.ask("/live"):
                    heard_at = clock.monotonic()
                    self._answered.add(number)
                    if number in self._missed:
                        self._missed.discard(number)
                        _send(process, signal.SIGHUP)
                elif clock.monotonic() - heard_at > SILENT_S:
                    logger.error("worker %d has not answered for %.0f s and is killed", number, SILENT_S)
                    _send(process, signal.SIGKILL)
                    return
            await clock.sleep(self._stop_within_s)
            logger.error("worker %d did not stop within %.0f s and is killed", number, self._stop_within_s)
            _send(process, signal.SIGKILL)
        finally:
            await siblings.close()

    def _leave(self) -> None:
        self._leaving.set()
        for process in self._processes.values():
            _send(process, signal.SIGTERM)

    def _pass_hangup_on(self) -> None:
        """Pass SIGHUP on. A worker that starts gets it once it has a handler; without one, it would end."""
        for number, process in self._processes.items():
            if number in self._answered:
                _send(process, signal.SIGHUP)
            else:
                self._missed.add(number)


def _send(process: Process, name: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        process.send_signal(name)
