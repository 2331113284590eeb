"""`/v1/chat/completions`: OpenAI's chat wire shape to calls and back, plain and streaming."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.dialects.base import Ask
from gateway.dialects.chat_wire import ChatTelling
from gateway.dialects.wire import (
    StreamOptions,
    Wishes,
    check_messages,
    check_sampling,
    decode_body,
    sampling_of,
    stops,
)
from gateway.edge.request import Arrival
from gateway.generations.generation import Call
from gateway.language.constraint import constraint_of
from gateway.language.render import ChatRenderer, Message, Tool
from gateway.sessions.identity import Caller
from gateway.sessions.user_names import user_named
from rollout_queue.http.errors import ApiError


class ChatRequest(Wishes, kw_only=True):
    """The fields of OpenAI's contract that change what is done; others are tolerated."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    response_format: dict[str, Any] | None = None
    n: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    return_token_ids: bool | None = False


class Chat:
    """The dialect of `/v1/chat/completions`."""

    prefix = "chatcmpl-"

    async def read(self, gateway: Collaborators, caller: Caller, arrival: Arrival) -> Ask:
        body = decode_body(arrival.body, ChatRequest)
        check(body)
        return Ask(
            calls=[call_of(gateway.renderer, body)],
            telling=ChatTelling(gateway.renderer, body, body.model or gateway.settings.model_name),
            n=body.n or 1,
            stream=bool(body.stream),
            model=body.model,
            metadata=body.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(error.body)


def check(body: ChatRequest) -> None:
    """Raises ApiError 400 for values outside the contract, or that this gateway does not serve."""
    check_messages(body.messages)
    check_sampling(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    check_tools(body.tools or ())


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises ApiError 400 for a tool that is no function."""
    for tool in tools:
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ApiError(400, "tools: each is a function", param="tools")


def call_of(renderer: ChatRenderer, body: ChatRequest) -> Call:
    asked = sampling_of(body, renderer.config.vocab_size)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None:
        asked["max_tokens"] = limit
    constraint = constraint_of(
        renderer, body.tools, body.tool_choice, body.response_format, body.parallel_tool_calls
    )
    return Call(
        messages=body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        asked=asked | constraint.asked,
        stop=stops(body.stop),
        stream=bool(body.stream),
        top_logprobs=body.top_logprobs or 0,
        constraint=constraint.parameters,
        user=user_named(body.user),
    )
