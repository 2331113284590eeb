"""LoRA adapters: what an engine has of them, and those that are policies of their own (`policy:name@1`).

operator ── AdapterBody ──▶ gateway ── WantedAdapters (POST /adapters, and at each registration) ──▶ servers
operator ◀── AdapterPushed: one AdapterResult per server ── gateway
"""

from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import ServiceMessage

ADAPTER_NAME = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$"
LARGEST = 2**53
"""Every JSON reader represents whole numbers below this one exactly."""
LARGEST_ASKED = 2**31
"""Callers name lower versions than this one, so later versions of the same name do not reach LARGEST."""


class AdapterShape(ServiceMessage):
    """A version that an engine answers with by an adapter, or without one by the weights alone."""

    version: int
    name: str | None
    """The adapter's name in requests to the engine (`lora_path`); null for the weights alone."""
    policy: str | None = None
    """The name of the policy that the adapter is; null for the fleet's policy."""


class WantedAdapter(ServiceMessage):
    """An adapter that is a policy of its own, and where its files are."""

    policy: str = Field(pattern=ADAPTER_NAME)
    version: int = Field(ge=0, lt=LARGEST)
    location: str = Field(max_length=4096)
    manifest_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")


class WantedAdapters(ServiceMessage):
    """Every adapter that a rollout server is to have; it forgets the others."""

    model_config = ConfigDict(extra="forbid", strict=False)

    revision: int = Field(ge=0, lt=LARGEST)
    """It grows with each change. A server ignores a list that is older than one that it has seen."""
    adapters: tuple[WantedAdapter, ...] = Field(max_length=1024)


class LoadedAdapter(ServiceMessage):
    """A wanted adapter on one server: whether it is there, and if not, why."""

    policy: str
    version: int
    ok: bool
    error: str | None = None
    refused: bool = False
    """The server refuses the adapter itself, so that the same fails again."""


class LoadedAdapters(ServiceMessage):
    """The answer to `POST /adapters`: one result for each wanted adapter."""

    results: tuple[LoadedAdapter, ...]


class AdapterBody(ServiceMessage):
    """An adapter to publish as a policy of its own. A `version` of null takes the next one of its name."""

    model_config = ConfigDict(extra="forbid", str_min_length=0)

    name: str = Field(pattern=ADAPTER_NAME)
    version: int | None = Field(None, ge=0, lt=LARGEST_ASKED)
    location: str = Field(max_length=4096)
    manifest_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")
    passing: bool = False
    """The oldest of these makes room for a new one if there are too many. Its publisher names what it holds,
    and may publish it again under the same version."""


class AdapterResult(ServiceMessage):
    """The result on one rollout server."""

    server: str
    ok: bool
    error: str | None = None
    refused: bool = False
    """The server refuses the adapter itself. Otherwise it was not there, or its engine was not."""


class AdapterPushed(ServiceMessage):
    """A published adapter, the model name that calls it, and the results, one per live server."""

    name: str
    version: int
    model: str
    results: tuple[AdapterResult, ...] = ()


class AdapterRow(ServiceMessage):
    """A published adapter, and the servers that have it now."""

    name: str
    version: int
    model: str
    location: str
    manifest_sha256: str | None = None
    created_at: float
    servers: tuple[str, ...] = ()


class AdapterPage(ServiceMessage):
    """Every published adapter, by name and version."""

    data: tuple[AdapterRow, ...]
    next_cursor: str | None = None


class AdapterRemoved(ServiceMessage):
    """An adapter that calls cannot name any more."""

    name: str
    version: int
    removed: bool
