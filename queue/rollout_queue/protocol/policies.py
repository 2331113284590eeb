"""Policies: trainer and operators ─▶ gateway, below `/admin/policies`.

trainer ── PolicyBody, RollbackBody ──▶ gateway ── ReloadBody ──▶ every rollout server
trainer ◀── Pushed: one PushResult per server ── gateway
"""

from pydantic import ConfigDict, Field

from rollout_queue.protocol.canaries import CanaryShape, PinShape
from rollout_queue.protocol.message import ServiceMessage

LARGEST = 2**53
"""Every JSON reader represents whole numbers below this one exactly."""


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
