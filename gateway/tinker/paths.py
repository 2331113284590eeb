"""The names of what a client has made: models, checkpoints, sampling sessions, promises.

{session}:train:{n}                          model
tinker://{model}/weights/{name}              a checkpoint: weights and optimizer
tinker://{model}/sampler_weights/{name}      weights to sample from
tinker://{model}/external_weights/{name}     an export: files for other programs
{session}:sample:{n}                         sampling session
c:{model}:{number}                           the promise of a command
s:{sampling session}:{number}                the promise of a sample

What Redis keeps of a client's session, its models and its samplers.
"""

import re
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from gateway.errors import ObjectNotFound, invalid
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema
from rollout_queue.trainer_commands import LoraSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The names that a client may give."""
Kind = Literal["weights", "sampler_weights", "external_weights"]
PATH = re.compile(rf"tinker://([^/\s]{{1,200}})/({'|'.join(get_args(Kind))})/(~?{NAME.pattern})")
PROMISE = re.compile(r"([cs]):(\S{1,200}):(\d{1,18})")


class WeightsPath(NamedTuple):
    """The parts of a `tinker://` path."""

    model_id: str
    kind: Kind
    name: str

    @property
    def kept_as(self) -> str:
        """The name under which the log keeps it."""
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class PromiseId(NamedTuple):
    """The parts of the id of a promise."""

    kind: Literal["c", "s"]
    of: str
    """The model, or the sampling session."""
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.of}:{self.number}"


def model_of(session_id: str, number: int) -> str:
    return f"{session_id}:train:{number}"


def session_of(model_id: str) -> str:
    return model_id.partition(":train:")[0]


def sampler_of(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"


def ephemeral(number: int) -> str:
    """The name of weights that a client samples from and does not name."""
    return f"~{number}"


def weights_path(text: str, param: str = "path") -> WeightsPath:
    """Raises InvalidRequest for a text that is no path."""
    found = PATH.fullmatch(text)
    if found is None:
        kinds = ", ".join(get_args(Kind))
        raise invalid(param, f"{text[:300]!r} is no tinker://model/kind/name with one of the kinds {kinds}")
    model_id, kind, name = found.groups()
    return WeightsPath(model_id, cast(Kind, kind), name)


def kept_path(model_id: str, kept_as: str) -> WeightsPath:
    """The path of what the log keeps under this name."""
    kind, _, name = kept_as.partition("/")
    return WeightsPath(model_id, cast(Kind, kind), name)


def given_name(text: str, param: str = "path") -> str:
    """A name that a client gives to what it saves. Raises InvalidRequest."""
    if not NAME.fullmatch(text):
        raise invalid(param, f"{text[:200]!r}: a name has letters, digits, '.', '_' and '-', and no slash")
    return text


def promise_id(text: str) -> PromiseId:
    """Raises ObjectNotFound for a text that is no promise."""
    found = PROMISE.fullmatch(text)
    if found is None:
        raise ObjectNotFound(f"no promise {text[:300]!r}", param="request_id")
    kind, of, number = found.groups()
    return PromiseId("c" if kind == "c" else "s", of, int(number))


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a user's loop, from create_session on."""

    session_id: str
    owner: str
    created_at: float
    sdk_version: str = ""
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None
    user: str | None = None
    """For whom it runs, so that it goes with this user's data."""


class ClientModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a client session has made."""

    model_id: str
    session_id: str
    owner: str
    created_at: float
    base_model: str
    lora: LoraSpec | None
    user_metadata: dict[str, Any] | None = None
    user: str | None = None


class SamplingTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling session samples from."""

    sampling_session_id: str
    session_id: str
    owner: str
    created_at: float
    base_model: str
    model_path: str | None = None
    """`tinker://{model}/sampler_weights/{name}`; None for the base model."""
    kind: Literal["base", "snapshot", "inflight"]
    user: str | None = None


class KeptTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a client said of weights that it saves."""

    ttl_s: float | None = None
    """How long they can be used; None: for ever."""
    user_metadata: dict[str, Any] | None = None
    public: bool = False
    """Whether other keys may read, load and sample them."""


Record = ClientSession | ClientModel | SamplingTarget
encode_record = msgspec.json.Encoder().encode
read_terms = msgspec.json.Decoder(KeptTerms).decode

UNREADABLE = (msgspec.MsgspecError, InvalidRecord, UnknownSchema)
"""What is raised for the bytes of a record that a newer gateway or trainer wrote, perhaps."""
