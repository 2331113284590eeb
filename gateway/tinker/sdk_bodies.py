"""The JSON bodies of the Tinker SDK's requests. An unknown field is refused by its name.

The body of the SDK's search for sessions.
"""

from typing import Annotated, Literal

from pydantic import AliasChoices, AwareDatetime, ConfigDict, Field, FiniteFloat

from gateway.rest.bodies import RestBody, StoredMetadata

SessionName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")]
ModelName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Ttl = Annotated[int, Field(ge=3600, le=315_360_000)]
Metadata = StoredMetadata | None
LONGEST_TEXT = 1000
"""Characters of a text that has no narrower bound."""


class TinkerBody(RestBody):
    """Every body may say its verb in `type`; the path says it too."""

    model_config = ConfigDict(protected_namespaces=(), str_max_length=LONGEST_TEXT)

    type: str | None = None


class ClientConfigBody(TinkerBody):
    sdk_version: str | None = None


class TinkerSessionBody(TinkerBody):
    tags: list[str] = Field([], max_length=100)
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class TinkerHeartbeatBody(TinkerBody):
    session_id: SessionName


class FinishReason(RestBody):
    type: Literal["success", "errored", "interrupted"]


class ClientFinishBody(TinkerBody):
    reason: FinishReason
    detail: str | None = Field(None, max_length=10_000)


class LoraBody(RestBody):
    rank: int = Field(ge=1, le=4096)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(RestBody):
    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerBody):
    session_id: SessionName
    model_seq_id: Number
    base_model: ModelName
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: Metadata = None


class ModelBody(TinkerBody):
    model_id: ModelName


class AdamBody(RestBody):
    """AdamW's settings for one step, with the SDK's defaults."""

    type: Literal["adamw"] = "adamw"
    learning_rate: FiniteFloat = Field(1e-4, ge=0)
    beta1: FiniteFloat = Field(0.9, ge=0, lt=1)
    beta2: FiniteFloat = Field(0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(1e-12, ge=0)
    weight_decay: FiniteFloat = Field(0.0, ge=0)
    grad_clip_norm: FiniteFloat = Field(0.0, ge=0)


class CommandBody(TinkerBody):
    model_id: ModelName
    seq_id: Number


class OptimStepBody(CommandBody):
    adam_params: AdamBody = Field(validation_alias=AliasChoices("adam_params", "optimizer_params"))


class SaveWeightsBody(CommandBody):
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata = None


class SaveForSamplerBody(CommandBody):
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata = None


class SaveExternalBody(CommandBody):
    path: str
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = Field(None, max_length=100)


class LoadWeightsBody(TinkerBody):
    path: str
    optimizer: bool
    model_id: ModelName | None = None
    seq_id: Number | None = None
    session_id: SessionName | None = None
    model_seq_id: Number | None = None
    base_model: ModelName | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: Metadata = None
    weights_access_token: str | None = None


class CopyWeightsBody(TinkerBody):
    source_path: str
    session_id: SessionName | None = None
    model_seq_id: Number | None = None
    destination_project_id: str | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: str | None = None


class TtlBody(TinkerBody):
    ttl_seconds: Ttl | None = None


class WeightsInfoBody(TinkerBody):
    tinker_path: str


class SamplingSessionBody(TinkerBody):
    session_id: SessionName
    sampling_session_seq_id: Number
    base_model: ModelName | None = None
    model_path: str | None = None


class CancelBody(TinkerBody):
    request_id: str = Field(max_length=300)


class FutureBody(TinkerBody):
    request_id: str = Field(max_length=300)
    allow_metadata_only: bool = False


class OwnQuery(RestBody):
    type: Literal["own", "accessible"] = "own"


class UserQuery(RestBody):
    type: Literal["user"]
    owner_urns: list[Annotated[str, Field(max_length=LONGEST_TEXT)]] = Field(min_length=1, max_length=10)


class StateQuery(RestBody):
    type: Literal["active", "cancelled", "failed"]


class ClientFinishedQuery(RestBody):
    type: Literal["client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(None, min_length=1)


class SearchCursor(RestBody):
    last_created_at: AwareDatetime = Field(strict=False)
    last_session_id: str = Field(max_length=150)


class SessionSearchBody(TinkerBody):
    session_id: str | None = Field(None, max_length=150)
    project_ids: list[str] | None = Field(None, max_length=100)
    user_metadata: dict[str, str] = Field({}, max_length=100)
    display_name: str | None = Field(None, min_length=1, max_length=1000)
    owner: Annotated[OwnQuery | UserQuery, Field(discriminator="type")] = OwnQuery()
    statuses: list[Annotated[StateQuery | ClientFinishedQuery, Field(discriminator="type")]] | None = Field(
        None, min_length=1
    )
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None
