"""The state of one rollout server (its `GET /status`) and of the whole system (`GET /admin/status`)."""

from collections.abc import Mapping

from rollout_queue.protocol.adapters import AdapterShape
from rollout_queue.protocol.message import ServiceMessage
from rollout_queue.protocol.model_checks import ModelCheck
from rollout_queue.protocol.policies import ServingShape
from rollout_queue.protocol.trainer import TrainerReport

NO_SIGN_OF_LIFE = "its engine gives no sign of life"
"""The `error` of a server whose engine hangs, or cannot be reached."""


class ServerStatus(ServiceMessage):
    """What a rollout server says of itself: rollout server ─▶ gateway, `GET /status`."""

    id: str | None = None
    process: str | None = None
    """Tells apart two processes that have the same id or URL; each start makes a new one."""
    state: str
    """starting, loading, ready, draining or dead."""
    version: int | None
    manifest_sha256: str | None = None
    push: int | None = None
    """The push in which it has proved this version; None if no push brought it."""
    adapters: tuple[AdapterShape, ...] = ()
    """The adapters that calls may name, the newest last, after the weights without one. Empty if the engine
    has no adapters."""
    engine_url: str | None = None
    restarts: int = 0
    running: int = 0
    """Requests in the engine."""
    waiting: int = 0
    kv_usage: float | None = None
    """The share of the engine's key-value cache that running requests have; None if it does not say."""
    released: bool = False
    """Whether the trainer has the memory of its engine. Calls wait there, so its state is then loading."""
    release: str | None = None
    """The release that it runs."""
    model_checks: tuple[ModelCheck, ...] = ()
    """What it found out about the model when it started."""


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
    load: int = 0
    """Calls of all gateways, as far as this one knows."""
    limit: int | None = None
    """How many calls it may have at once; None for no limit."""
    kv_usage: float | None = None
    """The share of its key-value cache that running requests have; None if its engine does not say."""


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


class TrafficReport(ServiceMessage):
    """What one gateway recorded since it started, with all its workers."""

    turns: int
    context_tokens: int
    """Tokens that turns added to their parent turns, and that were not sampled."""
    output_tokens: int


class PlacementReport(ServiceMessage):
    """Where one gateway, with all its workers, has sent its calls, and what their prefixes saved."""

    placed: Mapping[str, int]
    """Calls by reason."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompts that the engines had in their caches, and so did not compute."""
    waiting: int
    """Calls that wait for a server now."""


class SystemStatus(ServiceMessage):
    """The answer to `GET /admin/status`."""

    policy: ServingShape
    rollout_servers: tuple[ServerShape, ...]
    trainer: TrainerReport
    queue: QueueReport
    slowest_parts: tuple[SlowPart, ...] = ()
    """The five parts that took most seconds since this gateway started, the slowest first."""
    traffic: TrafficReport | None = None
    placement: PlacementReport | None = None
    renderer: str = ""
    """Whose chat template this gateway renders, and what it found out about it."""
    release: str | None = None
    """The release that this gateway runs."""
    model_checks: tuple[ModelCheck, ...] = ()
    """What this gateway found out about the model when it started."""
    warnings: tuple[str, ...]
