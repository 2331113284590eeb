"""The settings of the model, its optimizer, its critic and DeepSpeed, as a part of section `trainer`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from rollout_queue.settings import FOR_TESTS, TUNED, SettingsPart
from trainer_service.algorithms.returns import VALUE_CLIP

LORA_LEARNING_RATE, CRITIC_LEARNING_RATE = 1e-4, 1e-5
"""An adapter needs a rate some hundred times that of all weights for the same change of the policy."""


class OptimizerSettings(SettingsPart):
    """AdamW and its learning rate schedule."""

    lr: float = Field(1e-6, ge=0)
    """The learning rate. The default is 1e-4 with `lora`, and 1e-5 for a critic."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean of their squares."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decay of the weights."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decreases after the warm-up: not at all, linearly, or by half a cosine."""
    warmup_steps: int = Field(5, ge=0)
    """The number of steps in which the rate increases linearly to `lr`."""
    total_steps: int | None = Field(None, ge=1)
    """The number of steps, warm-up included, after which the rate stays at its minimum."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The minimum of the rate, as a factor of `lr`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "OptimizerSettings":
        if self.schedule == "constant" and (self.total_steps is not None or self.min_lr_ratio):
            raise ValueError("trainer.optimizer: total_steps and min_lr_ratio need schedule linear or cosine")
        if self.schedule != "constant" and (self.total_steps or 0) <= self.warmup_steps:
            raise ValueError(
                f"trainer.optimizer: schedule {self.schedule} needs total_steps, and more than warmup_steps"
            )
        return self

    def with_default_rate(self, lr: float) -> "OptimizerSettings":
        """These settings, with the learning rate `lr` if none was given."""
        return self if "lr" in self.model_fields_set else self.model_copy(update={"lr": lr})


class CriticSettings(SettingsPart):
    """The critic's optimizer, and the clip of its values."""

    optimizer: OptimizerSettings = OptimizerSettings(lr=CRITIC_LEARNING_RATE)
    value_clip: float | None = Field(VALUE_CLIP, gt=0)
    """The largest change of a value in one step, in units of the reward. A value that has changed more gets
    no gradient that changes it further. None does not clip."""

    @field_validator("optimizer")
    @classmethod
    def _has_a_rate(cls, optimizer: OptimizerSettings) -> OptimizerSettings:
        return optimizer.with_default_rate(CRITIC_LEARNING_RATE)


class LoraSettings(SettingsPart):
    """Low-rank adapters (LoRA, arXiv:2106.09685). The base weights are not trained. Published weights are the
    sum of base weights and adapters."""

    rank: int = Field(16, ge=1)
    """The rank of the adapters."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's product is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """The layers with an adapter, by the ends of their names. all-linear: all linear layers but the head."""
    merge_rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How merged weights are rounded to the type of the base model's file, if it has 16 bits. stochastic: up
    or down at random, without a bias. nearest: changes below half a rounding step are lost."""


class ModelSettings(BaseModel):
    """The fields of section `trainer` that the model needs."""

    model_path: Path
    """The Hugging Face directory of the base model; published versions copy its small files."""
    critic: CriticSettings | None = None
    """A second model that learns the values of tokens, for the advantages `gae` and `turn_gae`."""
    optimizer: OptimizerSettings = OptimizerSettings()
    seed: int = 0
    """The seed of new weights, such as those of adapters, and of shuffling."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the forward and backward pass; the optimizer always keeps float32. auto: bfloat16 on GPUs
    that multiply it (since Ampere) and from stage 1 on, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; auto: on a GPU if there is one."""
    zero_stage: int = Field(1, ge=0, le=3)
    """The data that ZeRO partitions over ranks. 0: nothing; 1: the optimizer's state; 2: also gradients; 3:
    also weights. With bfloat16, 1 is as 2."""
    sequence_parallel: int = Field(1, ge=1)
    """How many ranks compute each micro-batch together, each a slice of its tokens (DeepSpeed Ulysses), for
    rows that are too long for one device. Must divide the number of ranks and the model's heads."""
    rank_timeout_s: Annotated[float, FOR_TESTS] = Field(120.0, ge=1)
    """If a rank is silent for so long, all ranks end, so that they can be restarted together."""
    memory: Literal["exclusive", "shared"] = "exclusive"
    """shared: between steps, weights and optimizer are in host memory, and the engines of `shared_with` have
    the memory of the device. Needs zero_stage 1 or 2."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory, and make its steps there."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute the activations of each layer in the backward pass instead of keeping them. auto: on a GPU,
    if its memory is too small to keep them; never on CPU."""
    share_prefixes: bool = True
    """Compute a prefix that rows of a micro-batch have in common once: the prompt of a group, the history of
    a session's branches. Needs a model whose attention can be replaced, and no flash attention."""
    lora: LoraSettings | None = None
    """Train only adapters; None trains all weights."""
    router_replay: bool = False
    """Mixtures of experts: each token passes through the experts that the engine chose for it, where the
    gateway has recorded them (`gateway.router_replay`)."""
    reference_offload: bool = False
    """Keep the reference policy of a KL term in host memory between passes; at stage 3, between layers. With
    LoRA there is no copy: the reference is the policy without its adapters."""
    checkpoint_hf: bool = False
    """Whether each checkpoint also holds its weights as a Hugging Face directory, `model/`."""
    threads: Annotated[int | None, TUNED] = Field(None, ge=1)
    """The number of CPU threads of torch; None leaves the choice to torch."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """`dtype`. This and `recomputes_activations` take an `auto` that `sizing.resolved` has not replaced
        as on CPU."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def recomputes_activations(self) -> bool:
        return self.activation_checkpointing is True

    @property
    def sharding_stage(self) -> int:
        """The stage that DeepSpeed runs. It adds up gradients of bfloat16 in float32 at stages 2 and 3; at 1
        it does so only with an optimizer class that cannot move its state to host memory."""
        return max(2, self.zero_stage) if self.precision == "bfloat16" else self.zero_stage

    @property
    def learns_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, which needs the gradient of entropies."""
        return False

    @property
    def moves_reference(self) -> bool:
        """Whether the reference policy of a KL term follows the policy."""
        return False

    @property
    def learns_routing(self) -> bool:
        """Whether the loss has the routers' auxiliary loss."""
        return False

    @model_validator(mode="after")
    def _adapters_have_a_rate(self) -> "ModelSettings":
        if self.lora is not None:
            self.optimizer = self.optimizer.with_default_rate(LORA_LEARNING_RATE)
        return self

    @model_validator(mode="after")
    def _stage_zero_is_possible(self) -> "ModelSettings":
        if self.zero_stage == 0 and self.dtype == "bfloat16":
            raise ValueError(
                "trainer.dtype: bfloat16 needs zero_stage 1, 2 or 3; at stage 0 its rounding errors are ten "
                "times larger"
            )
        if self.memory == "shared" and self.zero_stage not in (1, 2):
            raise ValueError(
                f"trainer.memory: shared needs zero_stage 1 or 2; at stage {self.zero_stage}, DeepSpeed "
                "does not move the optimizer's state to host memory"
            )
        if self.zero_stage == 0 and self.offload_optimizer:
            raise ValueError("trainer.offload_optimizer: needs zero_stage 1, 2 or 3")
        return self
