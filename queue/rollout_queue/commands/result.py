"""The results of commands."""

from typing import Literal

import msgspec

from rollout_queue.commands.command import LoadWeights, Save
from rollout_queue.contract.tokens import Logprobs


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
