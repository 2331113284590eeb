"""Publishing policies: trainer ─▶ gateway, `/admin/policies` and `/admin/policies/rollback`.

trainer ── PolicyBody, RollbackBody ──▶ gateway ── ReloadBody ──▶ every rollout server
trainer ◀── Pushed: one PushResult per server ── gateway
"""

from pydantic import ConfigDict, Field

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


class RollbackBody(ServiceMessage):
    """The known version that the fleet is to serve again, under its own number."""

    model_config = ConfigDict(extra="forbid")

    to: int = Field(ge=0, lt=LARGEST)


class PushResult(ServiceMessage):
    """The result of a push on one rollout server."""

    server: str
    ok: bool
    version_served: int | None = None
    paused_s: float | None = None
    total_s: float
    error: str | None = None


class Pushed(ServiceMessage):
    """The results of a push, one per rollout server."""

    version: int
    results: tuple[PushResult, ...]


class PolicyVersion(ServiceMessage):
    """A version that the gateway knows; `location` is null for the one that the engines started with."""

    version: int
    location: str | None = None
    manifest_sha256: str | None = None
    step: int | None = None
    created_at: float | None = None
    state: str | None = None
    """published, serving, failed or retired."""


class PolicyPage(ServiceMessage):
    """Every known version, ascending."""

    data: tuple[PolicyVersion, ...]
    next_cursor: str | None = None
