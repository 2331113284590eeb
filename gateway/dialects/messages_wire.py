"""The objects of Anthropic's Messages contract: the request, the message with its blocks, a stream's events.

A field that is UNSET is left out of the JSON. An event's tag is its `type` field and its SSE event name.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects.wire import JsonObject
from gateway.language.parsed_answer import ToolCall

Sign = Callable[[str], str]
"""Signs the text of a thought."""
RAW_ARGUMENTS = "__raw_arguments"
"""Anthropic's `input` must be an object. Other arguments are sent as text in a field of this name."""


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """All fields of Anthropic's request, beta fields included, and `return_token_ids`."""

    messages: list[JsonObject]
    max_tokens: int | None = None
    model: str | None = None
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: JsonObject | None = None
    output_config: JsonObject | None = None
    output_format: JsonObject | None = None
    thread: JsonObject | None = None
    return_token_ids: bool | None = False
    thinking: JsonObject | None = None

    # Accepted: they change no token of the answer.
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    # Refused, except for values that change nothing, such as an empty list: `tables.MESSAGES` lists these.
    compaction: Any = None
    container: Any = None
    context_management: Any = None
    fallbacks: Any = None
    mcp_servers: Any = None
    speed: Any = None


class InputTokens(msgspec.Struct, frozen=True):
    """The reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """The model's reasoning. Clients keep a thought only if it is signed."""

    thinking: str
    signature: str = ""


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Text of the model's answer."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """A tool call of the model."""

    id: str
    name: str
    input: JsonObject


ContentBlock = ThinkingBlock | TextBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Anthropic's `usage`, in tokens. The prompt's tokens are `input_tokens` and the cached ones together."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply, or the message in a stream's first event."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: AnthropicMessage


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The last delta of a thought."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


BlockGrowth = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: BlockGrowth


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def input_of(call: ToolCall) -> JsonObject:
    """The arguments of a call as an object for Anthropic's `input`."""
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(call.arguments)
        if isinstance(arguments, dict) and arguments.keys() != {RAW_ARGUMENTS}:
            return arguments
    return {RAW_ARGUMENTS: call.arguments}
