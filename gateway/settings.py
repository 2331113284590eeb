"""What a deployment can set for the gateway, and the defaults."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_queue.contract.records import SamplingMode
from rollout_queue.settings import CommaSeparated, ServiceSettings


class SamplingSettings(BaseModel):
    """Sampling of sessions that do not say otherwise; the defaults are the ones that train exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: SamplingMode = "enforce"
    """Who decides: `enforce` the gateway, `default` the gateway where a call is silent, `allow` the call."""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


class LimitSettings(BaseModel):
    """Who may come in. A limit that is reached is a 429 with `Retry-After`; null: no limit.

    All gateways on one Redis count together. They tell each other of rates every `poll_every_s`: one gateway
    is exact, several let in at most what arrives within that time too much.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: int | None = Field(None, ge=1)
    """Model calls per client key; calls with a session key count for the key that made the session."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Tokens per client key, prompts and answers as `usage` counts them. A call is let in while something is
    left, and may use more than that; the next ones wait until it is paid off."""
    burst_s: float = Field(60.0, gt=0)
    """How many seconds' worth of a rate may be used at once, after a time of silence."""
    open_sessions: int | None = Field(None, ge=1)
    """Sessions in state `open`, of the whole deployment."""
    open_sessions_per_key: int | None = Field(None, ge=1)
    staleness_versions: int | None = Field(None, ge=0)
    """Versions that may pass from a session's opening to its training, at best the trainer's
    `algorithm.max_staleness` or fewer. New sessions for training wait while more is ahead of them than the
    trainer takes in that time; with 0, they are sampled for its next step only. No limit until a trainer has
    reported."""
    queue_entries: int | None = Field(None, ge=1)
    """Records that wait in the stream for the trainer; new sessions wait beyond that."""
    queue_memory: float | None = Field(0.9, gt=0, le=1)
    """Share of Redis' `maxmemory` from which on new sessions wait, so that open ones can end. Without
    `maxmemory`, no limit."""


class WarningSettings(BaseModel):
    """From when on `GET /admin/status` warns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trainer_silent_s: float = Field(30.0, gt=0)
    """Nothing was heard of the trainer for so long."""
    nothing_trained_s: float = Field(1800.0, gt=0)
    """No session was trained for so long, though some ended."""
    recent_sessions: int = Field(200, ge=1)
    """The sessions that ended last, by which the next two are told; from a tenth of them on."""
    untrained_share: float = Field(0.8, gt=0, le=1)
    """This share of them was not trained."""
    expired_share: float = Field(0.1, gt=0, le=1)
    """This share of them expired."""
    queue_share: float = Field(0.8, gt=0, le=1)
    """The queue has come so close to `limits.queue_entries` or `limits.queue_memory`."""


class GatewaySettings(ServiceSettings):
    """Section `gateway` of weir.yaml."""

    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    port: int = 8000
    public_url: str | None = None
    """The address that agents use, in `base_url` of new sessions; default: the one the request came to."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    model_path: Path
    """Hugging Face directory; the gateway reads its config.json and tokenizer, never its weights."""
    model_name: str = "policy"
    strict_models: bool = False
    """Refuse other model names than `model_name`; without it any name is served by the policy."""
    renderer: str = "auto"
    """Chat-template family, a name of the library `renderers`; auto: by the model's name, or its type."""
    thinking: Literal["template", "all"] = "template"
    """Past thoughts in a prompt: as the model's template has it, or all kept, so that turns extend."""
    context_length: int | None = None
    """Tokens of prompt and answer together; default: what the model's config says."""
    sampling: SamplingSettings = SamplingSettings()
    train_constrained: bool = True
    """Train turns whose answer was held to a grammar (`tool_choice`, `response_format`). Their logprobs are
    of the constrained distribution, so the policy's own, free one differs from them by design."""
    engines: CommaSeparated = []
    """Bare SGLang servers to use beside registered rollout servers."""
    client_keys: CommaSeparated = []
    """Keys of those who open and reward sessions."""
    admin_keys: CommaSeparated = []
    """Keys of operators; the services call each other with the first."""
    max_body_bytes: int = 32 * 2**20
    """Larger bodies are a 413."""
    limits: LimitSettings = LimitSettings()
    warnings: WarningSettings = WarningSettings()
    session_ttl_s: float = 3600.0
    """`ttl_s` of sessions that say nothing: they expire so long after their creation or last call."""
    retention_s: float | None = Field(7 * 86400.0, gt=0)
    """How long a session is kept once it has its verdict. In a Redis that fills up, the oldest go earlier.
    null: for ever."""
    engine_http: Literal["httptools", "aiohttp"] = "httptools"
    """The HTTP client that streams answers from engines: the gateway's own, or aiohttp's, which takes more
    CPU time per token."""
    engine_timeout_s: float = 600.0
    """Longest silence of an engine in the middle of an answer."""
    engine_wait_s: float = 20.0
    """How long a call waits for an engine to come into rotation before it gets a 503."""
    failover_patience_s: float = 180.0
    """How long an answer that an engine broke off waits for another, or for the same to be back."""
    join_identical: bool = False
    """Let identical calls that run at the same time share one answer, also where none is marked a retry."""
    retry_grace_s: float = Field(1.0, ge=0, le=1.5)
    """How long an answer goes on whose client has gone: one that gave up and retries takes it over."""
    heartbeat_s: float = Field(15.0, gt=0)
    """A stream that has nothing to say says so this often, since proxies cut silent connections."""
    push_timeout_s: float = 600.0
    """How long a server may take to load a policy."""
    drain_timeout_s: float = 30.0
    """How long calls in flight may go on after SIGTERM."""
    poll_every_s: float = 0.5
    """How often the fleet's state is read, and overdue sessions are looked for."""
