"""Runs a service as several workers until SIGTERM, and starts a worker again when it ends or hangs.

parent ──starts──▶ worker 0, worker 1, …     each listens on a socket of its own at the same address
   └── asks each worker for /live over its Unix socket; SIGTERM and SIGHUP are passed on

A worker has a number, and ends when the parent process ends. Over their Unix sockets workers ask each other;
their metrics are one text for Prometheus, each sample with the number of its worker.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from rollout_queue import clock
from rollout_queue.http.http_server import KEEP_ALIVE_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """A process that serves a share of the connections to a service."""

    number: int
    """From 0."""
    count: int
    folder: Path
    """Holds the Unix socket of each worker, at which the others reach it."""

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.count) if number != self.number]


def unix_socket(folder: Path, number: int) -> Path:
    """Where worker `number` listens for the other workers and the parent process."""
    return folder / f"{number}.sock"


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """A bound socket for each address of `host`. `shared`: other processes may bind the same address.

    Raises OSError if an address is taken. The kernel spreads new connections over the sockets that listen.
    """
    found = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            bound = socket.socket(family, kind, protocol)
            found.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
    except OSError:
        for bound in found:
            bound.close()
        raise
    return found


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, however it ends.

    The parent holds the other end of this process's standard input, which the kernel closes with the parent.
    """

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


ASK_S = 5.0
"""How long a worker may take to answer a question. Later it counts as one that does not answer."""
SILENT_S = 30.0
"""The parent process kills a worker that has not answered for this long."""
HUNG_S = SILENT_S + 2 * ASK_S
"""A worker that has not answered a question by then has been killed. So a question that must not be missed
waits this long: a worker that stood still for a while answers it."""
CONNECT = httpx.Timeout(None, connect=HUNG_S)


class Siblings:
    """The workers of one service that can be asked; none if it is a single process."""

    def __init__(self, folder: Path = Path(), numbers: Sequence[int] = ()) -> None:
        limits = httpx.Limits(max_connections=None)  # each belongs to a call, and calls are bounded
        self._clients = {
            number: httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(unix_socket(folder, number)), limits=limits),
                base_url="http://worker",
            )
            for number in numbers
        }

    @property
    def numbers(self) -> Sequence[int]:
        return list(self._clients)

    async def ask(self, path: str, question: bytes = b"", within_s: float = ASK_S) -> dict[int, bytes]:
        """Put a question to every worker at once. Returns the answers with status 200, by worker."""
        if not self._clients:
            return {}
        answers = await asyncio.gather(
            *(self._ask(number, path, question, within_s) for number in self._clients)
        )
        return {
            number: answer
            for number, answer in zip(self._clients, answers, strict=True)
            if answer is not None
        }

    @asynccontextmanager
    async def stream(self, number: int, path: str, question: bytes) -> AsyncIterator[httpx.Response]:
        """An answer that may take any time. Raises httpx.TransportError if the worker does not answer."""
        client = self._clients[number]
        async with client.stream("POST", path, content=question, timeout=CONNECT) as answer:
            yield answer

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, number: int, path: str, question: bytes, within_s: float) -> bytes | None:
        try:
            async with clock.timeout(within_s):
                answer = await self._clients[number].post(path, content=question, timeout=None)
        except (httpx.TransportError, TimeoutError) as error:
            logger.warning("worker %d did not answer %s: %r", number, path, error)
            return None
        return answer.content if answer.status_code == 200 else None


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


class _WithoutSignals(uvicorn.Server):
    """A server beside the service's own, which alone obeys signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def private_server(worker: Worker, app: ASGIApp) -> AsyncIterator[None]:
    """Serve `app` on the worker's Unix socket while the block runs. Only this user can reach it."""
    path = unix_socket(worker.folder, worker.number)
    config = uvicorn.Config(
        app,
        uds=str(path),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = _WithoutSignals(config)
    serving = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await serving


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """What Prometheus calls a metric family."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]
    """The name, the labels and the value of each sample."""


_families = msgspec.msgpack.Decoder(list[MetricFamily])


def exported(registry: CollectorRegistry) -> bytes:
    """The metrics of one worker, for `merged`."""
    return msgspec.msgpack.encode(
        [
            MetricFamily(
                family.name,
                family.documentation,
                family.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in family.samples],
            )
            for family in registry.collect()
        ]
    )


def merged(workers: Mapping[int, bytes | None]) -> bytes:
    """The text for Prometheus. `workers`: what `exported` returned, None for a worker that did not answer."""
    registry = CollectorRegistry()
    registry.register(_Merged(dict(sorted(workers.items()))))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, workers: Mapping[int, bytes | None]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        up = Metric("weir_worker_up", "1 for a worker that answered, 0 for one that did not", "gauge")
        families: dict[str, Metric] = {}
        for number, found in self._workers.items():
            up.add_sample("weir_worker_up", {"worker": str(number)}, float(found is not None))
            for family in _decoded(found):
                metric = families.setdefault(family.name, Metric(family.name, family.text, family.kind))
                for name, labels, value in family.samples:
                    metric.add_sample(name, {"worker": str(number), **labels}, value)
        yield up
        yield from families.values()


def _decoded(found: bytes | None) -> Sequence[MetricFamily]:
    return [] if found is None else _families.decode(found)
