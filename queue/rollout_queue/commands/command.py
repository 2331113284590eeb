"""The commands of a model, which are carried out in the order of their numbers, each exactly once.

CreateModel (0) ─▶ ForwardBackward, … ─▶ OptimStep ─▶ SaveForSampler ─▶ …
"""

import msgspec

from rollout_queue.commands.datum import Datum


class LoraSpec(msgspec.Struct, frozen=True):
    """Which layers of a model get an adapter, and its rank."""

    rank: int
    seed: int | None = None
    """Of the adapter's first weights; None leaves it to the trainer's own seed."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """Whether the output head has an adapter."""


class CreateModel(msgspec.Struct, frozen=True, tag="create"):
    """Make a model: the base model with a new adapter, or, without `lora`, all weights of the base model."""

    base_model: str
    lora: LoraSpec | None


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    """Compute log-probabilities and the loss, and add its gradient to that of the next optimizer step."""

    loss: str
    config: dict[str, float | str]
    """The settings of the loss that the caller gave."""
    data: tuple[Datum, ...]
    forward_only: bool = False
    """Compute the same values, and no gradient."""


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    """Make one step of AdamW (arXiv:1711.05101) with the gradient since the last one, and these settings."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """The largest norm of the gradient; 0 does not clip."""


class SaveWeights(msgspec.Struct, frozen=True, tag="save_weights"):
    """Write the weights and the state of the optimizer as a named checkpoint."""

    name: str
    overwrite: bool = False


class SaveForSampler(msgspec.Struct, frozen=True, tag="save_for_sampler"):
    """Publish the present weights, so that engines can sample from them."""

    name: str
    shared: bool = False
    """Samplers that asked for the shared weights of their model get these from now on (SHARED)."""


SHARED = "~shared"
"""The name under which the newest shared weights of a model are kept."""


class SaveExternal(msgspec.Struct, frozen=True, tag="save_external"):
    """Write the weights as files for other programs: an adapter in PEFT's layout, all weights in that of
    Hugging Face."""

    name: str


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    """Take the weights of a checkpoint, and with `optimizer` also the state of its optimizer. As the first
    command of a model, it makes the model."""

    model_id: str
    """The model that wrote the checkpoint."""
    name: str
    optimizer: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A command that was refused when it arrived. Its number is used up all the same."""

    error: str


Save = SaveWeights | SaveForSampler | SaveExternal
"""What makes something that lasts, under a name."""
Command = CreateModel | ForwardBackward | OptimStep | Save | LoadWeights | Refused


class LoggedCommand(msgspec.Struct, frozen=True):
    """A command at its place in the log."""

    position: str
    """Its place among the commands of all models; later commands have greater positions."""
    model_id: str
    number: int
    """Its place among the commands of its model (the client's `seq_id`)."""
    command: Command

    @property
    def request_id(self) -> str:
        return request_id(self.model_id, self.number)


def request_id(model_id: str, number: int) -> str:
    """The name under which the result of a command is read."""
    return f"{model_id}:{number}"
