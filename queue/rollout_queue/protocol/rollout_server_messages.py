"""What others say to a rollout server, and what it asks the trainer.

A change of weights: gateway ─▶ rollout server, `POST /reload` and `DELETE /reload/{version}`.

LoRA adapters: what an engine has of them, and those that are policies of their own (`policy:name@1`).

operator ── AdapterBody ──▶ gateway ── WantedAdapters (POST /adapters, and at each registration) ──▶ servers
operator ◀── AdapterPushed: one AdapterResult per server ── gateway

Tensors by a process group: a rollout server asks the trainer to send a version to its engine.

rollout server ── GET /collective/{version} ─▶ trainer      does it still have the tensors?
rollout server ── POST /collective/{version}, JoinBody ─▶ trainer ── Joining ─▶ engine joins, and receives
rollout server ── DELETE /collective/{group} ─▶ trainer      the engine has them, or has given up

An engine's memory: trainer ─▶ rollout server, `POST /memory/release` and `POST /memory/resume`.

The load of an engine, as SGLang's `GET /v1/loads` tells rollout servers and gateways.

vLLM's control of an engine, as prime-rl's orchestrator calls it: orchestrator ─▶ rollout server.

POST /pause?mode=keep ─▶ POST /update_weights ─▶ POST /resume
POST /load_lora_adapter
"""

from typing import Literal

import msgspec
from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import LARGEST, ServiceMessage


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


class AdapterShape(ServiceMessage):
    """A version that an engine answers with by an adapter, or without one by the weights alone."""

    version: int
    name: str | None
    """The adapter's name in requests to the engine (`lora_path`); null for the weights alone."""
    policy: str | None = None
    """The name of the policy that the adapter is; null for the fleet's policy."""


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


ADAPTER_NAME = r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$"
LARGEST_ASKED = 2**31
"""Callers name lower versions than this one, so later versions of the same name do not reach LARGEST."""


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


Device = Literal["cpu", "cuda"]


class JoinBody(ServiceMessage):
    """What the trainer has to know of the engine."""

    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    ranks: int = Field(ge=1, le=1024)
    """The engine's tensor-parallel size."""
    device: Device
    wait_s: float = Field(gt=0, le=600)
    """How long the server waits for its turn."""


class SentTensor(ServiceMessage):
    """One tensor of a bucket."""

    name: str
    dtype: str
    """torch's name: float32, bfloat16, …"""
    shape: tuple[int, ...]
    fingerprint: int
    """The sum of the bits of its first `FINGERPRINT_VALUES` values, taken as signed whole numbers."""


FINGERPRINT_VALUES = 2**20


class Joining(ServiceMessage):
    """Where the engine's ranks 1 … `world_size` - 1 join. Rank 0 is the trainer. It broadcasts one array of
    bytes for each bucket: the tensors of the bucket, one after the other."""

    master_address: str
    master_port: int
    group: str
    backend: Literal["gloo", "nccl"]
    world_size: int
    buckets: tuple[tuple[SentTensor, ...], ...]


LONGEST_S = 600.0
"""The longest time for which the memory is given away at once. A trainer that needs longer asks again."""


class ReleaseBody(ServiceMessage):
    """Who wants the memory, and for how many seconds."""

    model_config = ConfigDict(extra="forbid", strict=False)

    holder: str = Field(min_length=1, max_length=128)
    for_s: float = Field(gt=0, le=LONGEST_S)


class MemoryReleased(ServiceMessage):
    """The memory is the holder's."""

    version: int
    """The version that the engine served."""
    renewed: bool
    """Whether the memory was given away already."""


class ResumeBody(ServiceMessage):
    """Who gives the memory back; null takes it from anyone."""

    model_config = ConfigDict(extra="forbid", strict=False)

    holder: str | None = Field(None, min_length=1, max_length=128)


class MemoryResumed(ServiceMessage):
    """The memory is the engine's."""

    version: int
    """The version that the engine serves, or starts with."""


class RankLoad(msgspec.Struct, frozen=True):
    """The load of one data-parallel rank."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float | None = None
    """The share of the key-value cache that running requests have, without cached prefixes of no request."""


class EngineLoads(msgspec.Struct, frozen=True):
    """The answer of the route."""

    loads: tuple[RankLoad, ...] = ()

    @property
    def running(self) -> int:
        return sum(load.num_running_reqs for load in self.loads)

    @property
    def waiting(self) -> int:
        return sum(load.num_waiting_reqs for load in self.loads)

    @property
    def requests(self) -> int:
        """Those that run or wait."""
        return self.running + self.waiting

    @property
    def kv_usage(self) -> float | None:
        """That of the fullest rank; None if the engine does not say."""
        return max((load.token_usage for load in self.loads if load.token_usage is not None), default=None)


class UpdateWeightsBody(ServiceMessage):
    """A directory with weights. Null means that they come over NCCL, which no rollout server takes."""

    model_config = ConfigDict(extra="forbid", strict=False)

    weight_dir: str | None = Field(max_length=4096)
    skip_prefix_cache_reset: bool = False
    """Without effect: new weights always come with an empty cache."""


class LoadAdapterBody(ServiceMessage):
    """A directory with a LoRA adapter, and the name of the policy that it is."""

    model_config = ConfigDict(extra="forbid", strict=False)

    lora_name: str = Field(pattern=ADAPTER_NAME)
    lora_path: str = Field(max_length=4096)
    load_inplace: bool = False
    """Without effect: each version of a name is loaded beside the former ones."""


class EngineRouteDone(ServiceMessage):
    """It is done. `version` is the one that is served, or the adapter's."""

    status: Literal["ok"] = "ok"
    version: int
