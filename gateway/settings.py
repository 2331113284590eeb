"""What a deployment can set for the gateway, and the defaults."""

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rollout_queue.records import SamplingMode
from rollout_queue.settings import CommaSeparated, ServiceSettings


class SamplingSettings(BaseModel):
    """Sampling of sessions that do not say otherwise; the defaults are the ones that train exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: SamplingMode = "enforce"
    """Who decides: `enforce` the gateway, `default` the gateway where a call is silent, `allow` the call."""
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


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
    """Chat-template family, a name of the library `renderers`; auto: by the model's type."""
    context_length: int | None = None
    """Tokens of prompt and answer together; default: what the model's config says."""
    sampling: SamplingSettings = SamplingSettings()
    engines: CommaSeparated = []
    """Bare SGLang servers to use beside registered rollout servers."""
    client_keys: CommaSeparated = []
    admin_keys: CommaSeparated = []
    max_body_bytes: int = 32 * 2**20
    session_ttl_s: float = 3600.0
    engine_timeout_s: float = 600.0
    """Longest silence of an engine in the middle of an answer."""
    engine_wait_s: float = 20.0
    """How long a call waits for an engine to come into rotation before it gets a 503."""
    push_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    """How long calls in flight may go on after SIGTERM."""
    poll_every_s: float = 0.5
    """How often the fleet's state is read, and overdue sessions are looked for."""
