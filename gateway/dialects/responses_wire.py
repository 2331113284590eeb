"""The objects of OpenAI's Responses contract: the request, a response, the items of its output, its events.

A field that is UNSET is left out of the JSON. An event's tag is its `type` field and its SSE event name.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.wire import JsonObject, StreamOptions
from gateway.language.chat_messages import Tool

Item = JsonObject
"""An item of a conversation, from a client's request or from Redis."""

PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """All fields of OpenAI's request, and `return_token_ids`."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    """Reply at once; the client reads the answer by its id."""
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = True
    text: JsonObject | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: JsonObject | None = None
    reasoning: JsonObject | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = False

    # Accepted: they change no token of the answer.
    client_metadata: Any = None
    """Codex sends it."""
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None

    # Refused, unless they ask for nothing: `tables.RESPONSES`.
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    truncation: Any = None

    @property
    def with_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


# Items of the output


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: Sequence[str] = ()
    """Always empty: the model cites no files or pages."""
    logprobs: Sequence[Raw] = ()
    """Each a `TokenLogprob`."""


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    """The model's reasoning."""

    id: str
    type: str = "reasoning"
    summary: Sequence[str] = ()
    """Always empty: the reasoning itself is in `content`."""
    content: Sequence[ReasoningText]
    status: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    """The text of the model's answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    content: Sequence[OutputText]
    status: str


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model; `arguments` is JSON text."""

    id: str
    type: str = "function_call"
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputPart = ReasoningText | OutputText
OutputItem = ReasoningItem | MessageItem | FunctionCallItem


# The response


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response that are known before its first token."""

    id: str
    object: str = "response"
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: JsonObject | None
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: JsonObject | None
    safety_identifier: str | None
    user: str | None
    background: bool
    error: None = None
    parallel_tool_calls: bool
    service_tier: str = "default"
    store: bool
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[Tool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Responses' `usage`, in tokens."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    reason: str = "max_output_tokens"


class ResponseState(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response that depend on its tokens. The defaults describe a response that has begun."""

    status: str = "in_progress"
    completed_at: int | None = None
    incomplete_details: Incomplete | None = None
    output: Sequence[OutputItem] = ()
    usage: ResponseUsage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


# The events of a stream


class NumberedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The field that all events share."""

    sequence_number: int


class ResponseEventHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an event beside `response`, which contains the whole response."""

    type: str
    sequence_number: int
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class OutputItemAdded(NumberedEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(NumberedEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(NumberedEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputPart


class ContentPartDone(NumberedEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputPart


class ReasoningTextDone(NumberedEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class OutputTextDone(NumberedEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: Sequence[Raw]


class ArgumentsDelta(NumberedEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(NumberedEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorFields(msgspec.Struct, frozen=True):
    """An error in the shape of OpenAI's other paths."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEvent(NumberedEvent, frozen=True, kw_only=True, tag="error"):
    """An error in this contract's shape. `error` repeats it in the shape of OpenAI's other paths."""

    code: str
    message: str
    param: str | None
    error: ErrorFields
