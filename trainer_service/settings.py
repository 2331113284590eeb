"""What a deployment can set for the trainer, and the defaults."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_queue.settings import CommaSeparated, ServiceSettings
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.model.settings import ModelSettings


class GuardSettings(BaseModel):
    """Section `trainer.guards`. What is null is not guarded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_grad_norm_ratio: float | None = Field(100.0, gt=1)
    """`grad_norm`, before it is clipped, over its median of the last 100 steps; over 1 where that is less."""
    max_abs_logp: float | None = Field(0.2, gt=0)
    """`mismatch/abs_logp`, nats per token: mean |difference| of trainer and engine, staleness included."""
    max_kl: float | None = Field(0.2, gt=0)
    """`mismatch/kl`, nats per token, either way."""
    reward_drop: float | None = Field(0.5, gt=0)
    """How far the mean reward of the last `reward_groups` groups may fall from the best that there was, as a
    share of that best's size. A fall that noise explains does not count."""
    reward_groups: int = Field(32, ge=2)
    roll_back: bool = True
    """Have the fleet serve, while the training holds, the version whose sessions were rewarded best."""


class TeacherSettings(BaseModel):
    """Where the teacher is, and how many rows are sent to it at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """The address of an SGLang server: http://host:port."""
    api_key: str | None = None
    timeout_s: float = Field(120.0, gt=0)
    concurrency: int = Field(8, ge=1)


class WandbSettings(BaseModel):
    """Section `trainer.wandb`. The key is that of `wandb login`, or WANDB_API_KEY."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str
    name: str | None = None
    """Of the run; the processes of a training that was restarted have it in common."""
    entity: str | None = None
    group: str | None = None
    """Default: `name`."""
    id: str | None = None
    """The run that every process goes on with; without it, each process is a run of its own."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    """Offline runs lie in `dir`, for `wandb sync`."""
    dir: Path = Path("run")


class TrainerSettings(ServiceSettings, ModelSettings):
    """Section `trainer` of weir.yaml."""

    section: ClassVar[str] = "trainer"

    host: str = "127.0.0.1"
    port: int = 8200
    redis_url: str = "redis://127.0.0.1:6379/0"
    gateway_url: str = "http://127.0.0.1:8000"
    client_keys: CommaSeparated = []
    """Known so that a client's key is refused as such (403) and not as an unknown one."""
    admin_keys: CommaSeparated = []
    model_name: str = "policy"
    checkpoint_dir: Path = Path("run/checkpoints")
    policies_dir: Path = Path("run/policies")
    metrics_path: Path | None = Path("run/metrics.jsonl")
    """One JSON line per step; beside it `.eval.jsonl`, one line per evaluation."""
    tensorboard_dir: Path | None = Field(
        default_factory=lambda given: given["metrics_path"] and given["metrics_path"].parent / "tensorboard"
    )
    """Event files for TensorBoard; default: `tensorboard` beside `metrics_path`."""
    wandb: WandbSettings | None = None
    """A run at Weights & Biases; needs the extra `wandb`."""
    publish_url: str | None = None
    """Where rollout servers fetch versions: http://host:port/weights; default: file:// of `policies_dir`."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    teacher: TeacherSettings | None = None
    """Who judges each token, where the loss distils (preset `opd`)."""
    guards: GuardSettings = GuardSettings()
    """When the training pauses by itself."""
    checkpoint_every_steps: int = Field(1, ge=1)
    publish_every_steps: int = Field(1, ge=1)
    keep_checkpoints: int = Field(2, ge=2)
    keep_policies: int = Field(4, ge=2)
    initial_version: int = Field(0, ge=0)
    """The version of `model_path`."""
    push_timeout_s: float = Field(600.0, gt=0)
    """How long the gateway may take to push a version to every server."""
    lease_s: float = Field(30.0, ge=1)
    """How long a trainer that gave no sign keeps others from the stream; a crashed one's successor waits."""
    retry_s: float = Field(1.0, gt=0)
    """First pause before a gateway or Redis that does not answer is tried again; doubles up to 30 s."""

    @property
    def learns_entropy(self) -> bool:
        return self.algorithm.entropy_bonus > 0

    @model_validator(mode="after")
    def _a_teacher_is_there_to_be_heard(self) -> "TrainerSettings":
        if self.algorithm.needs_teacher != (self.teacher is not None):
            raise ValueError(
                f"trainer.teacher: loss {self.algorithm.loss.name} "
                + ("learns from one; set its url" if self.teacher is None else "does not listen to one")
            )
        return self

    @model_validator(mode="after")
    def _a_critic_is_there_to_be_asked(self) -> "TrainerSettings":
        if self.algorithm.needs_critic != (self.critic is not None):
            raise ValueError(
                f"trainer.critic: advantage {self.algorithm.advantage.name} "
                + ("asks one; set it, {} will do" if self.critic is None else "asks none")
            )
        return self

    @model_validator(mode="after")
    def _publish_url_is_plain(self) -> "TrainerSettings":
        if self.publish_url is not None and not self.publish_url.startswith(("http://", "https://")):
            raise ValueError("trainer.publish_url: an http:// address, or nothing for file://")
        return self
