"""The section `rollout_server` of the configuration, with every default."""

import re
import socket
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rollout_queue.http.http_server import http_url
from rollout_queue.settings import (
    BOUND,
    FOR_TESTS,
    CommaSeparated,
    HttpSettings,
    ObjectStoreSettings,
    ServiceKey,
    ServiceUrl,
    SettingsPart,
)
from rollout_queue.tracing import OtelSettings

Device = Literal["cpu", "cuda"]
UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]+")
"""The characters that an id may not have. Host names may have them."""


class EngineLoraSettings(SettingsPart):
    """The LoRA adapters that the engine takes."""

    max_rank: int = Field(64, ge=1)
    """The largest rank of an adapter."""
    target_modules: CommaSeparated = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj", "lm_head"),
    ]
    """The layers that may have an adapter, by the last part of their names."""
    max_loaded: int = Field(16, ge=2)
    """How many adapters the engine keeps in host memory. It drops the one that was called least recently."""
    max_per_batch: int = Field(8, ge=2)
    """How many adapters, the base model included, one batch may have."""

    @model_validator(mode="after")
    def _batch_fits(self) -> "EngineLoraSettings":
        if self.max_loaded < self.max_per_batch:
            raise ValueError(
                f"max_loaded ({self.max_loaded}) must be at least max_per_batch ({self.max_per_batch})"
            )
        return self


class RolloutServerSettings(HttpSettings):
    """One rollout server and its engine."""

    section: ClassVar[str] = "rollout_server"

    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """The name in the fleet; null: <host name>-<port>. The gateway refuses a second server with this name."""
    otel: OtelSettings | None = None
    """Traces; null: none."""
    port: int = 8100
    public_url: str | None = None
    """Where the gateway reaches this server; null means http://host:port. If `host` is 0.0.0.0, the
    URL has the address from which this machine reaches the gateway."""
    admin_keys: CommaSeparated = []
    rollout_server_key: ServiceKey = None
    """The key of all rollout servers: they present it to the gateway and the trainer, and take it from both.
    Null means the first admin key."""
    engine_key: ServiceKey = None
    """The key that the engine asks for; null: it asks for none."""
    gateway_url: str | None = None
    """Where to register; null for a server without a gateway."""
    register_every_s: Annotated[float, FOR_TESTS] = 5.0
    """How often the server tells the gateway its state."""
    settle_s: Annotated[float, FOR_TESTS] = 60.0
    """How long the gateway may name another version than this server serves, before the server loads it
    without a push. While a push goes on, the gateway may name the version before it."""

    model_path: Path
    """The Hugging Face directory that the engine starts with, known as `initial_version`."""
    initial_version: int = Field(0, ge=0)
    """The version number of the weights in `model_path`."""
    weights_dir: Path = Path("run/weights")
    """A directory on a disk of this machine. Several servers may share it. Each keeps the files of the
    current and the former version in a directory inside, which has its `id` as name. A server without an id
    takes the first free one of `server-0`, `server-1` …"""
    policies_dir: Path = Path("run/policies")
    trainer_url: ServiceUrl = Field("http://127.0.0.1:8200", min_length=1)
    locations: CommaSeparated = []
    """Prefixes that weights may come from (s3://bucket/); empty: weights_dir, policies_dir, trainer_url."""
    object_store: ObjectStoreSettings = ObjectStoreSettings()

    engine_python: str = sys.executable
    """The Python interpreter of the environment that has SGLang."""
    engine_host: str = "127.0.0.1"
    """Bind another address only with an `engine_key`, or in a closed network."""
    engine_port: int = 30000
    """The port on which the engine listens."""
    engine_public_url: str | None = None
    """Where the gateway reaches it; null: http://engine_host:engine_port. For 0.0.0.0 see `public_url`."""
    engine_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto: on a GPU if there is one."""
    memory: Literal["exclusive", "shared"] = "exclusive"
    """shared: the engine gives the memory of its device to a trainer for each step (`EngineMemory`)."""
    engine_args: list[str] = []
    """Appended to SGLang's command line, so they override the arguments of this service."""
    engine_log: Path | None = None
    """Null means run/logs/<name>-engine.log. The log of the former run is kept beside it, as `.1`."""
    engine_log_bytes: Annotated[int, BOUND] = Field(64 * 2**20, ge=2**20)
    """When the log is larger, its content moves to `.1`, and it begins anew."""
    engine_log_to_stdout: bool = False
    """Copy the engine's log to the standard output of the rollout server, for `docker logs`."""
    dtype: str | None = None
    """Null means float32 on CPU (exact logprobs) and the checkpoint's own type on CUDA."""
    context_length: int | None = None
    """The most tokens of prompt and answer together; null: what the model's config says."""
    max_running_requests: int | None = None
    """How many calls the engine answers at once; null: the engine decides."""
    max_total_tokens: int | None = None
    """How many tokens the engine's KV cache has. Null: on CPU as many as 3 % of the free memory
    takes, but 8,192 to 65,536; on CUDA SGLang decides."""
    random_seed: Annotated[int, FOR_TESTS] = 0
    """The seed with which the engine samples calls that have none."""
    router_replay: bool = False
    """Mixtures of experts: let the engine tell which experts it chose for each token."""
    lora: EngineLoraSettings | None = None
    """Take LoRA adapters; null takes whole weights only. It costs some speed."""

    boot_timeout_s: float = 900.0
    """How long the engine may take to start."""
    load_timeout_s: Annotated[float, FOR_TESTS] = 600.0
    """How long the engine may take to load a version."""
    control_timeout_s: Annotated[float, FOR_TESTS] = 30.0
    """How long the engine may take to pause, to resume, or to say its state."""
    fetch_timeout_s: Annotated[float, FOR_TESTS] = 60.0
    """A download that brings no byte for so long has failed."""
    adapter_timeout_s: Annotated[float, FOR_TESTS] = 300.0
    """How long it may take to fetch and verify an adapter that has a name."""
    collective_timeout_s: Annotated[float, FOR_TESTS] = 60.0
    """How long the trainer may take to begin to send tensors, and the engine to take a part of them."""
    collective_rest_s: Annotated[float, FOR_TESTS] = 600.0
    """After an engine was lost while it received tensors, versions are loaded from files for so long."""
    engine_wait_s: Annotated[float, FOR_TESTS] = 60.0
    """How long a reload waits for an engine that is just starting. The load of a push does not wait: other
    servers load meanwhile, and the gateway asks again."""
    hang_timeout_s: float = 120.0
    """An engine that does not answer for so long is killed and started again."""
    restart_backoff_s: Annotated[float, FOR_TESTS] = 0.5
    """The pause before the second start; it doubles with each further one, up to 30 s."""
    drain_timeout_s: float = 30.0
    """How long calls in flight may continue when the server stops."""
    stop_timeout_s: Annotated[float, FOR_TESTS] = 10.0
    """How long the engine may take to end before it is killed."""
    pause_limit_s: Annotated[float, FOR_TESTS] = Field(900.0, gt=0)
    """`POST /pause` pauses the engine for so long at most: whoever paused it may be gone."""

    @model_validator(mode="after")
    def _one_engine_key(self) -> "RolloutServerSettings":
        given = {each.split("=")[0] for each in self.engine_args}
        if self.engine_key is not None and {"--api-key", "--admin-api-key"} & given:
            raise ValueError("rollout_server.engine_args: with an engine_key, give no --api-key")
        return self

    @model_validator(mode="after")
    def _adapters_keep_their_memory(self) -> "RolloutServerSettings":
        if self.lora is not None and self.memory == "shared":
            raise ValueError("rollout_server.lora: adapters in the engine are lost with memory shared")
        return self

    @field_validator("public_url", "gateway_url", "engine_public_url")
    @classmethod
    def _without_trailing_slash(cls, value: str | None) -> str | None:
        return value.rstrip("/") or None if value else None

    @property
    def name(self) -> str:
        """The id in the fleet."""
        return self.id or f"{UNNAMEABLE.sub('-', socket.gethostname())[:120]}-{self.port}"

    @property
    def presented_key(self) -> str | None:
        """What the gateway and the trainer know this server by."""
        return self.rollout_server_key or next(iter(self.admin_keys), None)

    @property
    def engine_key_path(self) -> Path:
        """The file from which the engine reads its key. All users of the machine see command lines."""
        return self.log_path.with_suffix(".key")

    @property
    def engine_control_url(self) -> str:
        """The engine's address for this server, which is always on the same machine."""
        return http_url(self.engine_host, self.engine_port)

    @property
    def log_path(self) -> Path:
        return (self.engine_log or Path("run/logs") / f"{self.name}-engine.log").absolute()

    @property
    def allowed_locations(self) -> list[str]:
        """The prefixes in `locations`, or their defaults, as URLs; a plain path means that directory."""
        prefixes = self.locations or [str(self.weights_dir), str(self.policies_dir), self.trainer_url]
        return [prefix if "://" in prefix else Path(prefix).absolute().as_uri() for prefix in prefixes]
