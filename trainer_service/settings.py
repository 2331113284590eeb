"""What a deployment can set for the trainer, and the defaults."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_queue.settings import CommaSeparated, ServiceSettings


class AlgorithmSettings(BaseModel):
    """How rewards become a loss: the preset `default` for agents, asynchronous by up to eight versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    advantage: Literal["drgrpo"] = "drgrpo"
    """Reward minus the mean of its group, over rollouts."""
    zero_variance: float = Field(1e-6, ge=0)
    """A group whose rewards span no more than this teaches nothing."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a bad token that became likely, at this many times its advantage."""
    tis_cap: float | None = Field(2.0, gt=0)
    """Truncated importance sampling: the largest weight of a token for what the engine sampled otherwise."""
    outlier_low: float = Field(1e-4, ge=0)
    """A row is left out of the loss when the weight of any of its tokens lies outside [low, high]."""
    outlier_high: float = Field(100.0, gt=0)
    aggregation: Literal["token_mean"] = "token_mean"
    min_live_rows: int = Field(16, ge=1)
    """A step waits for this many rows with an advantage: Adam steps as far on one noisy group as on many."""
    max_rows: int = Field(256, ge=1)
    max_tokens: int = Field(1024, ge=1)
    """Tokens that one forward pass holds; a longer row is a pass of its own."""
    max_staleness: int = Field(8, ge=0)
    """Versions between the oldest sampled token of a rollout and the trainer; older is not trained."""
    truncated: Literal["drop", "train"] = "drop"
    """What becomes of a session that its agent finished as truncated."""
    epochs: int = Field(1, ge=1)
    """Optimizer steps over one batch; beyond one, the ratios are taken to a pass before the first."""
    flush_after_s: float | None = Field(60.0, gt=0)
    """Step with fewer rows when the stream was silent this long; None waits for ever."""
    group_wait_s: float = Field(3600.0, gt=0)
    """A group that heard nothing for this long goes on without the members that never came."""
    group_deadline_s: float | None = Field(None, gt=0)
    """A group goes on without its stragglers this long after its first member ended with a reward; None waits
    for all of them, or for `group_wait_s` of silence. What a straggler brings later is not trained."""
    group_min_size: int = Field(2, ge=2)
    """Rewarded members that a deadline needs; one alone compares with nobody, and would end the others for
    nothing."""


class OptimizerSettings(BaseModel):
    """AdamW and its schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(1e-6, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(5, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class TrainerSettings(ServiceSettings):
    """Section `trainer` of weir.yaml."""

    section: ClassVar[str] = "trainer"

    host: str = "127.0.0.1"
    port: int = 8200
    redis_url: str = "redis://127.0.0.1:6379/0"
    gateway_url: str = "http://127.0.0.1:8000"
    client_keys: CommaSeparated = []
    """Known so that a client's key is refused as such (403) and not as an unknown one."""
    admin_keys: CommaSeparated = []
    model_path: Path
    """The Hugging Face directory that training starts from; published versions copy its small files."""
    model_name: str = "policy"
    checkpoint_dir: Path = Path("run/checkpoints")
    policies_dir: Path = Path("run/policies")
    metrics_path: Path | None = Path("run/metrics.jsonl")
    """One JSON line per step."""
    publish_url: str | None = None
    """Where rollout servers fetch versions: http://host:port/weights; default: file:// of `policies_dir`."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint_every_steps: int = Field(1, ge=1)
    publish_every_steps: int = Field(1, ge=1)
    keep_checkpoints: int = Field(2, ge=2)
    keep_policies: int = Field(4, ge=2)
    initial_version: int = Field(0, ge=0)
    """The version of `model_path`."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; the optimizer always keeps float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    zero_stage: Literal[1] = 1
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; default: torch's own choice."""
    push_timeout_s: float = Field(600.0, gt=0)
    """How long the gateway may take to push a version to every server."""
    lease_s: float = Field(30.0, ge=1)
    """How long a trainer that gave no sign keeps others from the stream; a crashed one's successor waits."""
    retry_s: float = Field(1.0, gt=0)
    """First pause before a gateway or Redis that does not answer is tried again; doubles up to 30 s."""

    @model_validator(mode="after")
    def _publish_url_is_plain(self) -> "TrainerSettings":
        if self.publish_url is not None and not self.publish_url.startswith(("http://", "https://")):
            raise ValueError("trainer.publish_url: an http:// address, or nothing for file://")
        return self
