"""A change of weights: gateway ─▶ rollout server, `POST /reload`."""

from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import ServiceMessage


class ReloadBody(ServiceMessage):
    """Which version to serve, and where its files are. `location` is null for the version that the engine
    started with."""

    model_config = ConfigDict(extra="forbid", strict=False)

    version: int = Field(ge=0, lt=2**63, strict=True)
    location: str | None = Field(None, max_length=4096)
    manifest_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")
    force: bool = False
    """Serve the version even if its number is lower than the served one, or is the same and the files
    differ."""


class ReloadSeconds(ServiceMessage):
    """How long the parts of a reload took."""

    fetch: float
    verify: float
    load: float


class Reloaded(ServiceMessage):
    """The version that is served now. `paused_s` is how long generation stood still."""

    ok: bool
    version: int
    seconds: ReloadSeconds | None = None
    paused_s: float | None = None
