"""What Redis keeps of a client's session, its models and its samplers."""

from typing import Any, Literal

import msgspec

from rollout_queue.commands.command import LoraSpec
from rollout_queue.contract.errors import InvalidRecord, UnknownSchema


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
