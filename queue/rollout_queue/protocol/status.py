"""The state of one rollout server (its `GET /status`) and of the whole system (`GET /admin/status`)."""

from collections.abc import Mapping

from rollout_queue.protocol.adapters import AdapterShape
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.protocol.policies import ServingShape
from rollout_queue.protocol.trainer import TrainerReport


class ServerStatus(ServiceMessage):
    """What a rollout server says of itself: rollout server ─▶ gateway, `GET /status`."""

    id: str | None = None
    process: str | None = None
    """Tells apart two processes that have the same id or URL; each start makes a new one."""
    state: str
    """starting, loading, ready, draining or dead."""
    version: int | None
    manifest_sha256: str | None = None
    adapters: tuple[AdapterShape, ...] = ()
    """The adapters that calls may name, the newest last, after the weights without one. Empty if the engine
    has no adapters."""
    engine_url: str | None = None
    restarts: int = 0
    running: int = 0
    """Requests in the engine."""
    waiting: int = 0
    released: bool = False
    """Whether the trainer has the memory of its engine. Calls wait there, so its state is then loading."""


class ServerShape(ServiceMessage):
    """A rollout server as this gateway sees it."""

    id: str
    url: str | None
    engine_url: str
    state: str
    version: int | None
    in_flight: int
    breaker: str
    last_seen: float | None
    error: str | None


class ServerPage(ServiceMessage):
    """Every rollout server that the gateway knows."""

    data: tuple[ServerShape, ...]
    next_cursor: str | None = None


class QueueReport(ServiceMessage):
    """How much there is in Redis."""

    stream_length: int
    sessions: int
    unfinished_sessions: int
    verdicts: Mapping[str, int]
    dead_letters: int
    used_bytes: int | None = None
    """The memory that Redis uses."""
    max_bytes: int | None = None
    """Redis' `maxmemory`; 0 if it has none."""


class SlowPart(ServiceMessage):
    """A part of the calls that one gateway served, with all its workers: its seconds and its runs."""

    part: str
    seconds: float
    runs: int


class SystemStatus(ServiceMessage):
    """The answer to `GET /admin/status`."""

    policy: ServingShape
    rollout_servers: tuple[ServerShape, ...]
    trainer: TrainerReport
    queue: QueueReport
    slowest_parts: tuple[SlowPart, ...] = ()
    """The five parts that took most seconds since this gateway started, the slowest first."""
    renderer: str = ""
    """Whose chat template this gateway renders, and what it found out about it."""
    warnings: tuple[str, ...]
