"""The objects of `/inference/v1/generate`, vLLM's contract of token ids: the request and its answer.

A field that is UNSET is left out of the JSON.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.fields import Refusals
from gateway.dialects.wire import SamplingFields, Usage
from rollout_queue.contract.records import Span

SAMPLING: Refusals = {
    "logprobs": ((0, 1), "null, 0 or 1: the answer has the logprob of each sampled token, and no others"),
}


class TokenSamplingFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's sampling parameters."""

    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    routed_experts_prompt_start: int | None = None
    """The position of the first token whose routed experts the answer has, if it has any."""
    return_routed_experts: bool | None = None

    # Of the answer's text, which is not a part of the reply; a stop string is looked for in it.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None

    logprobs: int | None = None


class TokenIdsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request of vLLM's contract."""

    token_ids: list[int]
    sampling_params: TokenSamplingFields = msgspec.field(default_factory=TokenSamplingFields)
    model: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = False


class TokenIdLogprob(msgspec.Struct, frozen=True):
    """One sampled token; `token` is `token_id:` and its id."""

    token: str
    logprob: float


class TokenIdLogprobs(msgspec.Struct, frozen=True):
    """One entry for each sampled token."""

    content: Sequence[Raw]
    """Each is a `TokenIdLogprob`, as JSON."""


class ChoiceExperts(msgspec.Struct, frozen=True):
    """The experts of consecutive tokens of prompt and answer. The answer's last token has none."""

    data: str
    """Base64 of the experts' numbers, in C order. Clients find it by being the first field."""
    shape: tuple[int, int, int]
    """Tokens, layers, experts per token."""
    start: int
    """The position of the first of these tokens in the prompt."""
    dtype: str
    """`uint8`, or `uint16` (little-endian) if the model has more than 256 experts."""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `turn_id` and `versions` are Weir's: what they name in the views of sessions."""

    index: int
    token_ids: list[int]
    logprobs: TokenIdLogprobs
    finish_reason: str
    turn_id: str
    versions: Sequence[Span]
    routed_experts: ChoiceExperts | UnsetType = UNSET


class TokenIdsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The reply."""

    request_id: str
    model: str
    choices: Sequence[TokenChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
