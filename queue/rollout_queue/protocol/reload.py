"""A change of weights: gateway ─▶ rollout server, `POST /reload` and `DELETE /reload/{version}`."""

from pydantic import ConfigDict, Field

from rollout_queue.protocol.adapters import AdapterShape
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
    prepare: bool = False
    """Only fetch and verify the files, while the engine goes on with what it serves. A later request for the
    same version then loads them."""
    peer: str | None = Field(None, max_length=4096)
    """The URL of another rollout server that has the files: they are read from there first. The manifest is
    read from `location` in any case."""
    push: int | None = Field(None, ge=0, lt=2**63)
    """The id of the gateway's push. A server refuses an id that is lower than one that it has seen."""


class ReloadSeconds(ServiceMessage):
    """How long the parts of a reload took."""

    fetch: float
    verify: float
    load: float


class Reloaded(ServiceMessage):
    """The version that is served now. `paused_s` is how long generation stood still."""

    ok: bool
    version: int
    prepared: int | None = None
    """The version whose files are ready to be loaded, if the request was to prepare one."""
    seconds: ReloadSeconds | None = None
    paused_s: float | None = None
    adapters: tuple[AdapterShape, ...] = ()
    """As in the server's `/status`."""
    fallback: str | None = None
    """Why the files were loaded, although the trainer offered to send the tensors."""


class Aborted(ServiceMessage):
    """The answer to `DELETE /reload/{version}`."""

    version: int
    """The version that is served now."""
    aborted: bool
    """Whether reloads of the named version were ended, before the engine paused."""
    loading: int | None = None
    """The version that the engine is loading. That cannot be ended."""
    adapters: tuple[AdapterShape, ...] = ()
    """As in the server's `/status`."""
