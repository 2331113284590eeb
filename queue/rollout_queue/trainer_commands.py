"""The commands of a model, which are carried out in the order of their numbers, each exactly once.

CreateModel (0) ─▶ ForwardBackward, … ─▶ OptimStep ─▶ SaveForSampler ─▶ …

A datum is one sequence of tokens, the targets that the model is to predict, and numbers for the loss.

client ─▶ gateway ── in order, once ─▶ log ── read ─▶ trainer ── answer ─▶ the client's poll
                                        ▲ └─ after a crash, it reads again from its checkpoint on
                                        └─ free: what a durable checkpoint contains is removed

In Redis, commands and results are one schema byte, then MessagePack.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from rollout_queue.contract.codec import decode_packed
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds, pack


class Datum(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """N tokens, and K targets for each. Position i of the tokens predicts its targets: the caller has shifted
    them. Raises InvalidRecord if the lengths contradict each other, or a number is not finite."""

    tokens: TokenIds
    """int32 [N]: what the model reads."""
    targets: TokenIds
    """int32 [N * K], position by position."""
    k: int = 1
    """How many targets a position has; more than one are soft targets."""
    numbers: dict[str, Logprobs] = {}
    """float32 [N * K] each, by name: `weights`, `logprobs`, `advantages`, `sequence_ratio_mask`."""

    def __post_init__(self) -> None:
        if self.k < 1 or not self.tokens or len(self.targets) != len(self.tokens) * self.k:
            raise InvalidRecord(
                f"a datum has {len(self.tokens)} tokens and {len(self.targets)} targets of {self.k} each"
            )
        for name, values in self.numbers.items():
            if len(values) != len(self.targets):
                raise InvalidRecord(
                    f"{name}: a datum has {len(values)} values for {len(self.targets)} targets"
                )
            if not values.finite:
                at = next(at for at, value in enumerate(values) if not math.isfinite(value))
                raise InvalidRecord(f"{name}: value {at} is {values[at]}")

    def __len__(self) -> int:
        return len(self.tokens)


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


class Created(msgspec.Struct, frozen=True, tag="created"):
    """The model exists."""


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """What a forward pass, or a forward and a backward pass, has computed."""

    logprobs: tuple[Logprobs, ...]
    """float32 [N * K] for each datum, nats: log p of each target under the trained weights."""
    k: int
    metrics: dict[str, float]
    """By name; each name ends in `:sum`, `:mean`, `:min` or `:max`, as results of parts are joined."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The optimizer has made its step."""

    metrics: dict[str, float]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """A named checkpoint is durable."""

    size_bytes: int


class Published(msgspec.Struct, frozen=True, tag="published"):
    """Engines can sample from the weights: at least one has proved that it has them."""

    policy: str
    """The name of the adapter that the weights are, or "" for the fleet's policy."""
    version: int
    location: str
    manifest_sha256: str | None = None
    size_bytes: int = 0


class Exported(msgspec.Struct, frozen=True, tag="exported"):
    """The files of an export are durable."""

    location: str
    """The directory of the files: an absolute path, which gateways have to read."""
    size_bytes: int


class WeightsLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The model has the weights of the checkpoint."""


class CommandFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The command had no effect. Later commands of its model are carried out all the same."""

    error: str
    category: Literal["user", "server", "unknown"]


Result = Created | Passed | Stepped | Saved | Published | Exported | WeightsLoaded | CommandFailed


Named = Save | LoadWeights
"""The commands whose results have the names that the commands had."""


class Answer(msgspec.Struct, frozen=True):
    """A result as the log keeps it."""

    result: Result
    command: Named | None = None
    """The command, if its result has its names."""


class Kept(msgspec.Struct, frozen=True):
    """What a command has made that lasts: a checkpoint, weights to sample from, or an export."""

    made: Saved | Published | Exported
    number: int
    """The number of the command."""
    created_at: float
    position: str = ""
    """The command's place in the log; "" in a record of an older build."""


BEGINNING = "0-0"
"""The position before the first command."""


WHOLE_MODEL = "*"
"""The name in the note of a model that is gone: the log frees its commands, and nothing of it stays."""


class Drop(NamedTuple):
    """Weights were deleted: what was saved up to the place `saved` is gone for commands after `deleted`."""

    saved: str
    deleted: str


class Dropped(NamedTuple):
    """What was deleted, and has files still, perhaps."""

    weights: Mapping[tuple[str, str], Sequence[Drop]]
    """By model and name (`weights/{name}`, `sampler_weights/{name}`, `external_weights/{name}`,
    WHOLE_MODEL), in the order of their deletion."""
    adapters: Mapping[tuple[str, int], str]
    """Versions of adapters that nobody can name: adapter and version → the place of the command that made
    it."""


SCHEMA = 1
_SCHEMA_BYTE = bytes([SCHEMA])


# Equal commands have equal bytes, whatever the order of their dictionaries.
_encoder = msgspec.msgpack.Encoder(enc_hook=pack, order="deterministic")
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=decode_packed)
_answer_decoder = msgspec.msgpack.Decoder(Answer, dec_hook=decode_packed)
_kept_decoder = msgspec.msgpack.Decoder(Kept)


def encode(record: Command | Answer | Kept) -> bytes:
    return _SCHEMA_BYTE + _encoder.encode(record)


def decode_command(packed: bytes) -> Command:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _command_decoder.decode(_body(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not a command: {error}") from error


def decode_answer(packed: bytes) -> Answer:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _answer_decoder.decode(_body(packed))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not an answer: {error}") from error


def decode_kept(packed: bytes) -> Kept:
    """Raises UnknownSchema for a newer schema, InvalidRecord for other bytes."""
    try:
        return _kept_decoder.decode(_body(packed))
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"not what a command has made: {error}") from error


def _body(packed: bytes) -> memoryview:
    if not packed:
        raise InvalidRecord("an empty record")
    if packed[0] != SCHEMA:
        raise UnknownSchema(f"schema {packed[0]}; this build reads schema {SCHEMA}")
    return memoryview(packed)[1:]
