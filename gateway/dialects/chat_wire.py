"""The objects of OpenAI's chat contract: the request, the completion, and the chunks of a stream.

A field that is UNSET is left out of the JSON.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.wire import GuidedFields, JsonObject, StreamOptions, Usage
from gateway.language.chat_messages import Message, Tool
from gateway.language.parsed_answer import ParsedAnswer, ToolCall


class ChatRequest(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's request, and `top_k`, `min_p`, `repetition_penalty`, `return_token_ids`,
    `chat_template_kwargs` and `GuidedFields`."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = True
    functions: list[JsonObject] | None = None
    """The older form of `tools`; the answer then has at most one `function_call`."""
    function_call: str | JsonObject | None = None
    """The older form of `tool_choice`."""
    response_format: JsonObject | None = None
    n: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    metadata: JsonObject | None = None
    user: str | None = None
    return_token_ids: bool | None = False
    continue_final_message: bool | None = False
    """The answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`; a contradiction is refused."""
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    """`enable_thinking` (or `thinking`) and `reasoning_effort`; others are refused."""

    # Accepted: they change no token of the answer.
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None

    # Refused, unless they ask for nothing (`fields.CHAT`). `verbosity` may have any of `fields.VERBOSITIES`.
    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the answer; in a chunk of a stream also its index."""

    index: int | UnsetType = UNSET
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as a message."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`."""

    content: list[Raw]
    """Each a `TokenLogprob`."""
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole reply to a request that does not stream."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChunkEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every chunk of one stream repeats."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The part that a chunk adds to a message. `ChatEvents` writes deltas of text without this struct."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta = ChatDelta()
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChunkFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a chunk that follow its envelope."""

    choices: Sequence[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def message_of(answer: ParsedAnswer, with_functions: bool) -> ChatMessage:
    """The answer as OpenAI's message; `with_functions` if the request has `functions` in place of `tools`."""
    calls = [tool_call_of(call) for call in answer.tool_calls]
    if calls and with_functions:  # a grammar permits one call only
        return ChatMessage(
            content=answer.content or None,
            reasoning_content=UNSET if answer.reasoning is None else answer.reasoning,
            function_call=calls[0].function,
        )
    return ChatMessage(
        content=(answer.content or None) if calls else answer.content,
        reasoning_content=UNSET if answer.reasoning is None else answer.reasoning,
        tool_calls=calls or UNSET,
    )


def finish_of(finish: str, with_functions: bool) -> str:
    """Why the answer ended, in OpenAI's words."""
    return "function_call" if with_functions and finish == "tool_calls" else finish


def tool_call_of(call: ToolCall, index: int | UnsetType = UNSET) -> ChatToolCall:
    function = FunctionCall(call.name, call.arguments)
    return ChatToolCall(index=index, id=call.call_id, function=function)
