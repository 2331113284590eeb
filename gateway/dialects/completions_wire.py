"""The objects of OpenAI's completions contract: the request, and choices of text with their logprobs.

A field that is UNSET is left out of the JSON.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects.logprobs import CompletionLogprobs
from gateway.dialects.wire import GuidedFields, JsonObject, StreamOptions, Usage


class CompletionRequest(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's request, and `top_k`, `min_p`, `repetition_penalty`, `metadata`,
    `return_token_ids`, `add_special_tokens` and `GuidedFields`."""

    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    metadata: JsonObject | None = None
    user: str | None = None
    return_token_ids: bool | None = False
    add_special_tokens: bool | None = True
    """A prompt of text begins with the model's begin token, if its tokenizer says so."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or the part that a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply, or one chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
