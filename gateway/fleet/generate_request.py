"""What an answer is asked for by, and the body of SGLang's `POST /generate` in SGLang's names."""

import base64
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType


class Adapter(NamedTuple):
    """A LoRA adapter of an engine: its name there, and the version that it is."""

    name: str
    version: int


@dataclass(frozen=True)
class AllowedVersions:
    """Which versions may answer a call."""

    version: int | None = None
    """If set, only this one."""
    adapter: str | None = None
    """The name of the adapter whose version that is; None for the fleet's policy."""
    prefers: int | None = None
    """If set, this one as long as a server can answer with it, and else any that the fleet admits."""


ANY = AllowedVersions()


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is sampled. Fields that are not UNSET are always sent, so no engine's default applies."""

    max_new_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool | UnsetType = UNSET
    min_new_tokens: int | UnsetType = UNSET
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    logit_bias: dict[str, float] | UnsetType = UNSET
    """By token id."""
    sampling_seed: int | UnsetType = UNSET
    stop: list[str] | UnsetType = UNSET
    structural_tag: str | UnsetType = UNSET
    """The grammar of the answer, as JSON."""
    skip_special_tokens: bool = False
    stream_interval: int = 1
    """Tokens per event: 1 for a client that streams, more for one that waits for the whole answer."""


class PromptImage:
    """A PNG of a prompt. It becomes a data URL only while a request is written: that is a third longer, and
    each occurrence of an image has its own."""

    __slots__ = ("png",)

    def __init__(self, png: bytes) -> None:
        self.png = png

    @property
    def url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `rid` is its id at the engine, by which it can be aborted."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParameters
    return_logprob: bool = True
    top_logprobs_num: int = 0
    stream: bool = True
    return_routed_experts: bool | UnsetType = UNSET
    routed_experts_start_len: int | UnsetType = UNSET
    """The position of the first token whose experts are returned."""
    cache_salt: str | UnsetType = UNSET
    """Requests with different salts share no cached prefixes."""
    logprob_start_len: int | UnsetType = UNSET
    """The position of the first token of the prompt that is scored; no token of it if UNSET."""
    token_ids_logprob: list[int] | UnsetType = UNSET
    """Ids that are scored in the place of each token that is scored."""
    lora_path: str | UnsetType = UNSET
    """The name of the adapter that answers, at this engine."""
    image_data: list[PromptImage] | UnsetType = UNSET
    """The images of the prompt, written as data URLs. An engine would read paths and addresses, too."""


class SampleRequest(msgspec.Struct, frozen=True):
    """A request for one answer."""

    rid: str
    session_id: str
    allowed: AllowedVersions
    input_ids: list[int]
    parameters: SamplingParameters
    top_logprobs: int = 0
    experts_from: int | None = None
    """The position of the first token whose experts are requested; None requests none."""
    cache_salt: str | None = None
    cached_at: str = ""
    """The id of the server that sampled the turn which this one continues; it may have the prefix cached."""
    cached_version: int | None = None
    """The version with which that server ended that turn."""
    images: list[PromptImage] = []
    """The images of the prompt in their order; `input_ids` has one pad for each."""
    prompt_tokens: int | None = None
    """How many tokens the engine must make of a prompt with images; None without images."""
    image_pads: frozenset[int] = frozenset()
    """Ids that an engine takes for images where they are in a prompt."""
    owner: str = ""
    """The client key for which the call counts."""


def _written(image: Any) -> str:
    if isinstance(image, PromptImage):
        return image.url
    raise NotImplementedError(f"{type(image).__name__} is not sent to engines")


encode = msgspec.json.Encoder(enc_hook=_written).encode
"""The JSON of a `GenerateBody`."""
