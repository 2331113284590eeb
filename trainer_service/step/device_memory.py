"""Shares the memory of a device with the engines on it: they give it away while the trainer uses it.

train     take ─▶ states to the device ─▶ restore, or step ─▶ states to the host ─▶ give back ─▶ save, publish
servers   └─ POST /memory/release, asked again while it is needed                   └─ POST /memory/resume
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from types import TracebackType

import httpx

from rollout_queue import clock
from rollout_queue.protocol.gateway_messages import ServerStatus
from rollout_queue.protocol.message import MalformedMessage, ServiceMessage, error_message
from rollout_queue.protocol.rollout_server_messages import MemoryReleased, ReleaseBody, ResumeBody
from trainer_service.heartbeat import Heartbeat, Stopped
from trainer_service.step.ranks import DistributedPolicy

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""If the trainer dies, the engines take their memory back after this time."""
ASK_EVERY_S = 5.0
START_POLL_S = 0.5
"""How often a server is asked whether its engine has started."""
TIMEOUT_S = 20.0
ATTEMPTS = 3
"""How often a server is asked to take its memory back. After LEASE_S, it does so by itself."""


class MemoryUnavailable(Exception):
    """A rollout server does not give its engine's memory, or does not answer. It may do so later."""


class RolloutMemory:
    """The memory of one rollout server's engine."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self.url = client, url.rstrip("/")
        self._holder = f"trainer-{uuid.uuid4().hex}"

    def starts(self) -> bool:
        """Whether the engine starts: it takes the memory, and a release would throw its start away. Waits
        for a moment then."""
        with suppress(httpx.HTTPError, MalformedMessage):
            reply = self._client.get(f"{self.url}/status", timeout=TIMEOUT_S)
            if reply.status_code == httpx.codes.OK:
                said = ServerStatus.read(reply.content)
                if said.state == "starting" and not said.released:
                    clock.pause(START_POLL_S)
                    return True
        return False

    def release(self) -> bool:
        """Have the engine give its memory away for LEASE_S from now on. Returns whether it had done so
        before. Raises MemoryUnavailable."""
        reply = self._post("release", ReleaseBody(holder=self._holder, for_s=LEASE_S))
        try:
            return MemoryReleased.read(reply.content).renewed
        except MalformedMessage as error:
            raise MemoryUnavailable(f"{self.url}: {error}") from error

    def resume(self) -> None:
        """Have the engine take its memory again. Does not wait longer than TIMEOUT_S. Raises
        MemoryUnavailable."""
        try:
            self._post("resume", ResumeBody(holder=self._holder))
        except MemoryUnavailable as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout):
                raise
            logger.info("%s still takes its engine's memory back", self.url)

    def _post(self, path: str, body: ServiceMessage) -> httpx.Response:
        url = f"{self.url}/memory/{path}"
        try:
            reply = self._client.post(url, json=body.model_dump(), timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            raise MemoryUnavailable(f"{self.url}: {type(error).__name__}: {error}") from error
        if reply.status_code != httpx.codes.OK:
            raise MemoryUnavailable(f"{self.url}: HTTP {reply.status_code}: {error_message(reply.content)}")
        return reply


class DeviceMemory:
    """The memory of the trainer's device. With no `servers`, it is the trainer's alone.

    Each server has a thread, so that none waits for the answer of another one. While the memory is taken,
    it asks the server again. `close` ends the threads.
    """

    def __init__(self, servers: Sequence[RolloutMemory], heartbeat: Heartbeat) -> None:
        self._servers, self._heartbeat = servers, heartbeat
        self._threads = [ThreadPoolExecutor(1, "memory") for _ in servers]
        self._taken: threading.Event | None = None
        """Set when the memory is not needed any more; None while the engines have it."""

    @property
    def shared(self) -> bool:
        return bool(self._servers)

    def take(self) -> None:
        """Wait until every engine has given its memory away. Raises Stopped when told to stop meanwhile."""
        if self._taken is not None or not self.shared:
            return
        try:
            self._heartbeat.retry(self._ask_all, MemoryUnavailable, "waiting", self._sentence)
        except Stopped:
            self._submit(_resume)
            raise
        over = self._taken = threading.Event()
        self._submit(lambda server: _keep(server, over))

    @contextmanager
    def held(self, policy: DistributedPolicy) -> Iterator[None]:
        """Have the memory, and the policy in it, while the block runs. If the block raises, the policy stays
        on the device until the process ends, and the engines take their memory back LEASE_S later."""
        if not self.shared:
            yield
            return
        self.take()
        policy.reload_states()
        yield
        policy.offload_states()
        self._end()
        self._submit(_resume)

    def close(self) -> None:
        """Do not ask for the memory any more, and wait for the answers of servers that take it back."""
        self._end()
        for thread in self._threads:
            thread.shutdown()

    def __enter__(self) -> "DeviceMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        if self._taken is not None:
            self._taken.set()
            self._taken = None

    @property
    def _sentence(self) -> str:
        return f"the engine's memory from {', '.join(server.url for server in self._servers)}"

    def _ask_all(self) -> None:
        """Raises MemoryUnavailable unless all engines have given their memory away at the same time."""
        while any(self._each(RolloutMemory.starts)):
            pass
        for _ in range(ATTEMPTS):
            if all(self._each(RolloutMemory.release)):  # each had given it away before
                return
        raise MemoryUnavailable("an engine has taken it back meanwhile")

    def _each(self, ask: Callable[[RolloutMemory], bool]) -> list[bool]:
        """What all servers answer. Raises Stopped when told to stop meanwhile."""
        asked = [
            thread.submit(ask, server) for thread, server in zip(self._threads, self._servers, strict=True)
        ]
        for each in asked:
            self._heartbeat.wait_for(each, "waiting", lambda: self._sentence)
        return [each.result() for each in asked]

    def _submit(self, work: Callable[[RolloutMemory], None]) -> None:
        """Have each thread do this after what it was given before."""
        for thread, server in zip(self._threads, self._servers, strict=True):
            thread.submit(copy_context().run, work, server).add_done_callback(_report)


def _keep(server: RolloutMemory, over: threading.Event) -> None:
    """Have the server wait until `over` is set."""
    while not clock.wait(over, ASK_EVERY_S):
        try:
            if not server.release():
                logger.error("%s has taken its engine's memory back during a step", server.url)
        except MemoryUnavailable as error:
            logger.warning("the engine's memory may be taken back during a step: %s", error)


def _resume(server: RolloutMemory) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            server.resume()
            return
        except MemoryUnavailable as error:
            logger.warning("%s; attempt %d of %d to give its memory back", error, attempt, ATTEMPTS)


def _report(done: "Future[None]") -> None:
    if (error := done.exception()) is not None:
        logger.error("the engine's memory is not looked after", exc_info=error)
