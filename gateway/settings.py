"""The gateway's settings, with their defaults."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout_queue.contract.records import SamplingMode
from rollout_queue.settings import CommaSeparated, ServiceSettings


class SamplingSettings(BaseModel):
    """Sampling of sessions that set none themselves. Only the defaults keep recorded logprobs exact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: SamplingMode = "enforce"
    """Whose parameters count; `enforce`: these; `default`: the call's, else these; `allow`: the call's."""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


class LimitSettings(BaseModel):
    """Limits on calls and new sessions. Beyond one, a request gets a 429 with `Retry-After`; null: no limit.

    All gateways on one Redis count together, and share their counts every `poll_every_s`. One gateway is
    exact; several may exceed a limit by what arrives within that time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: int | None = Field(None, ge=1)
    """Model calls per client key; calls with a session key count for the key that made the session."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Tokens per client key, prompts and answers as `usage` counts them. A call is admitted while any tokens
    are left, and may use more than those; later calls then wait for longer."""
    burst_s: float = Field(60.0, gt=0)
    """How many seconds' worth of a rate may be used at once after a pause."""
    open_sessions: int | None = Field(None, ge=1)
    """Sessions in state `open`, in the whole deployment."""
    open_sessions_per_key: int | None = Field(None, ge=1)
    staleness_versions: int | None = Field(None, ge=0)
    """Policy versions that may pass from a session's opening to its training; set it to the trainer's
    `algorithm.max_staleness` or lower. New sessions for training are refused while more rollouts are ahead of
    them than the trainer takes in that time; 0 admits only those for its next step. No limit until a trainer
    has reported."""
    queue_entries: int | None = Field(None, ge=1)
    """From this many records in the stream for the trainer on, new sessions are refused."""
    queue_memory: float | None = Field(0.9, gt=0, le=1)
    """From this share of Redis' `maxmemory` in use on, new sessions are refused, so that open ones can end.
    No limit where Redis has no `maxmemory`."""


class WarningSettings(BaseModel):
    """When `GET /admin/status` warns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trainer_silent_s: float = Field(30.0, gt=0)
    """Warn when the trainer has not reported for so long."""
    nothing_trained_s: float = Field(1800.0, gt=0)
    """Warn when no session was trained for so long though some ended."""
    recent_sessions: int = Field(200, ge=1)
    """The next two settings look at so many sessions, those that ended last; a tenth of them must exist."""
    untrained_share: float = Field(0.8, gt=0, le=1)
    """Warn when this share of them was not trained."""
    expired_share: float = Field(0.1, gt=0, le=1)
    """Warn when this share of them expired."""
    queue_share: float = Field(0.8, gt=0, le=1)
    """Warn when the queue uses this share of `limits.queue_entries` or `limits.queue_memory`."""


class GatewaySettings(ServiceSettings):
    """Section `gateway` of weir.yaml."""

    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    port: int = 8000
    public_url: str | None = None
    """The address that agents use, in `base_url` of new sessions; default: the one the request came to."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_connection: Literal["pipelined", "pooled"] = "pipelined"
    """How turns are written to Redis: over one connection that all calls share, or by redis-py's own client,
    which takes more CPU time per call."""
    model_path: Path
    """Directory in Hugging Face's format. The gateway reads its config.json and tokenizer, no weights."""
    model_name: str = "policy"
    strict_models: bool = False
    """Refuse model names other than `model_name`; if false, the policy answers for any name."""
    renderer: str = "auto"
    """Chat-template family, as the library `renderers` names it; auto: by the model's name or type."""
    thinking: Literal["template", "all"] = "template"
    """Earlier reasoning in prompts; `template`: as the chat template has it; `all`: kept, so turns extend."""
    context_length: int | None = None
    """Tokens of prompt and answer together; default: what the model's config says."""
    sampling: SamplingSettings = SamplingSettings()
    train_constrained: bool = True
    """Train turns whose answer a grammar constrained (`tool_choice`, `response_format`). Their logprobs are
    those of the constrained distribution, which differs from the policy's unconstrained one."""
    engines: CommaSeparated = []
    """Bare SGLang servers to use beside registered rollout servers."""
    client_keys: CommaSeparated = []
    """API keys of clients, who open and reward sessions."""
    admin_keys: CommaSeparated = []
    """API keys of operators; the services use the first one to call each other."""
    max_body_bytes: int = 32 * 2**20
    """Largest request body; a larger one gets a 413."""
    limits: LimitSettings = LimitSettings()
    warnings: WarningSettings = WarningSettings()
    session_ttl_s: float = 3600.0
    """Default `ttl_s` of sessions: they expire so long after their creation or last call."""
    retention_s: float | None = Field(7 * 86400.0, gt=0)
    """How long a session is kept once it has its verdict; null: for ever. In a Redis that fills up, the
    oldest are removed earlier."""
    engine_http: Literal["httptools", "aiohttp"] = "httptools"
    """The HTTP client that streams answers from engines: the gateway's own, or aiohttp's, which takes more
    CPU time per token."""
    engine_timeout_s: float = 600.0
    """How long an engine may send nothing in the middle of an answer."""
    engine_wait_s: float = 20.0
    """How long a call waits for an available engine before it gets a 503."""
    failover_patience_s: float = 180.0
    """How long an answer that an engine failed to finish waits for another engine, or for the same one."""
    join_identical: bool = False
    """Let identical concurrent calls share one answer, also where none is marked as a retry."""
    retry_grace_s: float = Field(1.0, ge=0, le=1.5)
    """How long an answer continues after its client disconnected: a retry within that time takes it over."""
    heartbeat_s: float = Field(15.0, gt=0)
    """How often a stream without new tokens sends a comment, since proxies close silent connections."""
    push_timeout_s: float = 600.0
    """How long a server may take to load a policy."""
    drain_timeout_s: float = 30.0
    """How long calls in flight may continue after SIGTERM."""
    poll_every_s: float = 0.5
    """How often the state of the fleet is read, and overdue sessions are expired."""
