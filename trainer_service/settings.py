"""What a deployment can set for the trainer, and the defaults."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_queue.settings import CommaSeparated, ServiceSettings
from trainer_service.algorithms.advantages.settings import VALUE_CLIP
from trainer_service.algorithms.settings import AlgorithmSettings
from trainer_service.guards import GuardSettings
from trainer_service.sinks.weights_and_biases import WandbSettings
from trainer_service.step.teacher import TeacherSettings


class OptimizerSettings(BaseModel):
    """AdamW and its schedule."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(1e-6, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes down after the warm-up: not at all, evenly, or by half a cosine."""
    warmup_steps: int = Field(5, ge=0)
    """Steps in which the rate grows evenly from nothing to `lr`."""
    total_steps: int | None = Field(None, ge=1)
    """The step, counted with the warm-up, at which the rate has come down; it stays there."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """What is left of the rate then, as a part of `lr`."""
    max_grad_norm: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _the_schedule_knows_its_end(self) -> "OptimizerSettings":
        if self.schedule == "constant" and (self.total_steps is not None or self.min_lr_ratio):
            raise ValueError("trainer.optimizer: total_steps and min_lr_ratio need schedule linear or cosine")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"trainer.optimizer: schedule {self.schedule} needs total_steps, and more than warmup_steps"
            )
        return self


class CriticSettings(BaseModel):
    """How fast the critic learns, and how far a step of it may go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    value_clip: float | None = Field(VALUE_CLIP, gt=0)
    """A value that is further than this from what it was before the step gets no gradient from there on."""


class LoraSettings(BaseModel):
    """Low-rank adapters: the base weights stay as they are, and what is published is the sum of both."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    """The adapter's part of a weight is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the layers that get an adapter, as their last part; all-linear: every one but the head."""


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
    critic: CriticSettings | None = None
    """A second model that learns what each token on is worth, for the advantages `gae` and `turn_gae`."""
    optimizer: OptimizerSettings = OptimizerSettings()
    guards: GuardSettings = GuardSettings()
    """When the training pauses by itself."""
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
    zero_stage: int = Field(1, ge=0, le=3)
    """What ranks share out among themselves: nothing, the optimizer's state, also gradients, also weights."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the memory of the host, and step there."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass in place of keeping what it made."""
    lora: LoraSettings | None = None
    """Train adapters alone; None trains every weight."""
    reference_offload: bool = False
    """Keep the copy of the base model that a KL term compares with in the memory of the host between passes.
    With LoRA there is no copy: it is the policy without its adapters."""
    checkpoint_hf: bool = True
    """Each checkpoint holds its weights a second time, as a Hugging Face directory `model/`."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; default: torch's own choice."""
    push_timeout_s: float = Field(600.0, gt=0)
    """How long the gateway may take to push a version to every server."""
    lease_s: float = Field(30.0, ge=1)
    """How long a trainer that gave no sign keeps others from the stream; a crashed one's successor waits."""
    retry_s: float = Field(1.0, gt=0)
    """First pause before a gateway or Redis that does not answer is tried again; doubles up to 30 s."""

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
    def _stage_zero_keeps_no_second_weights(self) -> "TrainerSettings":
        if self.zero_stage == 0 and self.dtype == "bfloat16":
            raise ValueError(
                "trainer.dtype: bfloat16 needs zero_stage 1, 2 or 3; DeepSpeed's stage 0 is ten times coarser"
            )
        if self.zero_stage == 0 and self.offload_optimizer:
            raise ValueError("trainer.offload_optimizer: needs zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _publish_url_is_plain(self) -> "TrainerSettings":
        if self.publish_url is not None and not self.publish_url.startswith(("http://", "https://")):
            raise ValueError("trainer.publish_url: an http:// address, or nothing for file://")
        return self
