"""What others say to the gateway below `/admin`, and the state of the system that it answers.

The state of one rollout server (its `GET /status`) and of the whole system (`GET /admin/status`).

Canaries and pins: operators ─▶ gateway, below `/admin/policies`.

Policies: trainer and operators ─▶ gateway, below `/admin/policies`.

trainer ── PolicyBody, RollbackBody ──▶ gateway ── ReloadBody ──▶ every rollout server
trainer ◀── Pushed: one PushResult per server ── gateway

Registration: rollout server ─▶ gateway, `POST /admin/rollout_servers`, every few seconds.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import LARGEST, Id, ModelCheck, ServiceMessage
from rollout_queue.protocol.rollout_server_messages import AdapterShape, WantedAdapters
from rollout_queue.protocol.trainer_messages import TrainerReport


class GatesBody(ServiceMessage):
    """The bounds that a canary has to keep. What is not sent is as in `gateway.canary`. A bound of null is
    not looked at."""

    model_config = ConfigDict(extra="forbid")

    min_groups: int = Field(10, ge=3, le=5000)
    max_kl: float | None = Field(0.1, gt=0)
    max_reward_drop: float | None = Field(0.1, ge=0)
    max_error_increase: float | None = Field(0.05, ge=0, le=1)
    max_length_change: float | None = Field(0.5, gt=0)
    deadline_s: float = Field(3600.0, gt=0)


class CanaryBody(ServiceMessage):
    """Which calls a canary answers, and what it has to show; the defaults are `gateway.canary`."""

    model_config = ConfigDict(extra="forbid")

    share: float | None = Field(None, gt=0, lt=1)
    """The share of the new groups that it answers."""
    sticky: Literal["group", "session"] | None = None
    """What is never divided between two versions."""
    gates: GatesBody = GatesBody()


class PinBody(ServiceMessage):
    """The servers that keep a version: so many, or these ones."""

    model_config = ConfigDict(extra="forbid")

    servers: (
        Annotated[int, Field(ge=1, le=10_000)]
        | Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=10_000)]
    ) = 1


class GateShape(ServiceMessage):
    """What one gate shows. `low` and `high` are the interval that has the true value 19 times of 20."""

    gate: str
    """kl, reward, errors or length."""
    state: str
    """holds, broken, undecided or missing."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float
    count: int
    """How many groups the value is made of."""


class CanaryShape(ServiceMessage):
    """A canary, open or ended, with its numbers."""

    id: int
    version: int
    baseline: int
    state: str
    """opening, open, promoted, rolled_back or superseded."""
    servers: tuple[str, ...]
    share: float
    sticky: str
    automatic: bool
    started_at: float
    opened_at: float | None = None
    ended_at: float | None = None
    min_groups: int
    groups: int
    """How many of its groups have ended."""
    baseline_groups: int
    gates: tuple[GateShape, ...]
    reason: str | None = None
    """Why it ended."""


class CanaryPage(ServiceMessage):
    """The open canary, and the last ones that ended, the newest first."""

    data: tuple[CanaryShape, ...]
    next_cursor: str | None = None


class PinShape(ServiceMessage):
    """A server that keeps a version, for calls that name it."""

    server: str
    version: int
    since: float


class Pins(ServiceMessage):
    """All pins."""

    data: tuple[PinShape, ...]
    next_cursor: str | None = None


class PolicyBody(ServiceMessage):
    """A version to publish. If `version` is null, the gateway gives it the next free number."""

    # With a bound on their length, pydantic reads strings whole, and refuses half a surrogate pair, which
    # UTF-8 cannot encode.
    model_config = ConfigDict(extra="forbid", str_min_length=0)

    version: int | None = Field(None, ge=0, lt=LARGEST)
    location: str
    """The URL of the directory that has the version's files."""
    manifest_sha256: str | None = None
    step: int | None = Field(None, ge=0, lt=LARGEST)
    """The optimizer step that made the weights."""
    size_bytes: int | None = Field(None, ge=0, lt=LARGEST)
    """What the version's files take on the publisher's disk, changes included."""
    force: bool = False
    """Accept a number that is higher than the next free one."""


class RollbackBody(ServiceMessage):
    """The known version that the fleet is to serve again, under its own number."""

    model_config = ConfigDict(extra="forbid")

    to: int = Field(ge=0, lt=LARGEST)
    hold: bool = True
    """Later versions are registered, and not pushed, until an operator promotes one or releases the fleet."""


class HoldBody(ServiceMessage):
    """Why the fleet is to keep what it serves."""

    model_config = ConfigDict(extra="forbid", str_min_length=0)

    reason: str = Field("held by an operator", max_length=500)


class PushResult(ServiceMessage):
    """The result of a push on one rollout server."""

    server: str
    ok: bool
    state: str | None = None
    """waiting, preparing, prepared, loading, proved, refused, failed or unavailable."""
    version_served: int | None = None
    paused_s: float | None = None
    total_s: float
    error: str | None = None


class PushShape(ServiceMessage):
    """A push. It is under way (pushing), or has ended (serving, failed, superseded)."""

    id: int
    version: int
    state: str
    proved: int | None = None
    """How many servers serve the version, of the `servers` that the push has reached."""
    servers: int | None = None
    started_at: float
    ended_at: float | None = None
    error: str | None = None
    capacity: float | None = None
    """The smallest share of the live servers that could take calls during the push."""


class Pushed(ServiceMessage):
    """A version, its push, and the results so far, one per rollout server."""

    version: int
    state: str | None = None
    """The state of the push. If none begins: `held`, because an operator holds the fleet; `canary`, because
    the version waits for its own canary or for the end of another one."""
    push: PushShape | None = None
    results: tuple[PushResult, ...] = ()


class HoldShape(ServiceMessage):
    """New versions are registered, and not pushed."""

    since: float
    reason: str


class PolicyVersion(ServiceMessage):
    """A version that can be served; `location` is null for the one that the engines started with."""

    version: int
    location: str | None = None
    manifest_sha256: str | None = None
    step: int | None = None
    size_bytes: int | None = None
    """What its files take on the publisher's disk; null if the publisher did not say."""
    created_at: float | None = None
    state: str | None = None
    """published, serving, failed or retired."""


class PolicyDetail(PolicyVersion):
    """A version, its last push, and the results of that push."""

    push: PushShape | None = None
    results: tuple[PushResult, ...] = ()


class PolicyPage(ServiceMessage):
    """Every version that can be served, ascending."""

    data: tuple[PolicyVersion, ...]
    next_cursor: str | None = None
    reserved: int | None = None
    """The highest number that the trainer has reserved, if its version is not published yet."""


class PushPage(ServiceMessage):
    """The last pushes, the newest first."""

    data: tuple[PushShape, ...]
    next_cursor: str | None = None


class PolicyRemoved(ServiceMessage):
    """A version that cannot be served any more: its files may be removed."""

    version: int
    removed: bool


class ServingShape(ServiceMessage):
    """What the fleet serves, and what it is to serve."""

    serving: int | None
    """The newest version that a server has proved."""
    target: int | None
    """The version that every server is to serve in the end."""
    admissible: tuple[int, ...] = ()
    """The versions that may answer calls, the served one first."""
    hold: HoldShape | None = None
    push: PushShape | None = None
    """The last push."""
    canary: CanaryShape | None = None
    """The open canary, without its numbers."""
    pins: tuple[PinShape, ...] = ()


class ServerBody(ServiceMessage):
    """A rollout server says where it, and its engine, can be reached."""

    url: str = Field(pattern=r"^https?://")
    engine_url: str = Field(pattern=r"^https?://")
    id: Id
    process: str | None = Field(None, min_length=1, max_length=128)
    """What `ServerStatus.process` says; null for a server that an operator registers."""
    forget_after_s: float | None = Field(None, gt=0)
    """The gateway removes a dead server that has not registered for this time; null means that it stays."""


class Registered(ServiceMessage):
    """The gateway's answer: the policy that the fleet serves, null before the first, and the adapters that
    are policies of their own."""

    id: str
    policy: PolicyVersion | None = None
    adapters: WantedAdapters | None = None


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
