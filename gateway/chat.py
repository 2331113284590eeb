"""`/v1/chat/completions`: OpenAI's chat wire shape to generations and back, plain and streaming."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.chat_wire import ChatChunks, logprobs_of, message_of, reply_headers, usage
from gateway.collaborators import Collaborators, collaborators
from gateway.deltas import AnswerStream
from gateway.generation import Call, Generation
from gateway.render import Answer, Message, Tool
from gateway.wire import check_messages, decode_body, pinned_version, unless_gone
from rollout_queue.head import SessionHead
from rollout_queue.records import Turn
from rollout_queue.web.errors import ApiError

logger = logging.getLogger(__name__)

SAMPLING_FIELDS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The fields of OpenAI's contract that change what is done; others are tolerated."""

    messages: list[Message]
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    return_token_ids: bool | None = False


async def chat_completions(request: Request) -> Response:
    """Answer a chat call; each choice is a turn of its own."""
    gateway = collaborators(request)
    caller = gateway.identities.caller(request)
    body = decode_body(await request.body(), ChatRequest)
    check(body)
    head = await gateway.belonging.session_of(request, caller, body.metadata, body.messages, body.tools)
    call = call_of(gateway, body, head)
    generations = gateway.generator.begin(head, call, body.n or 1)
    answering = _stream if body.stream else _plain
    return await answering(gateway, request, body, generations)


def check(body: ChatRequest) -> None:
    """Raises ApiError 400 for values outside the contract, or that this gateway does not serve."""
    check_messages(body.messages)
    _within("n", body.n, 1, 128)
    _within("temperature", body.temperature, 0, 2)
    _within("top_p", body.top_p, 0, 1)
    _within("top_logprobs", body.top_logprobs, 0, 20)
    _within("max_tokens", body.max_tokens, 1, 2**31)
    _within("max_completion_tokens", body.max_completion_tokens, 1, 2**31)
    _within("frequency_penalty", body.frequency_penalty, -2, 2)
    _within("presence_penalty", body.presence_penalty, -2, 2)
    _within("seed", body.seed, -(2**63), 2**63 - 1)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.tool_choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice: this gateway serves auto and none", param="tool_choice")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ApiError(400, "response_format: this gateway serves text", param="response_format")
    for tool in body.tools or ():
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise ApiError(400, "tools: each is a function", param="tools")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ApiError(400, f"{name}: {value} is not within {low} and {high}", param=name)


def call_of(gateway: Collaborators, body: ChatRequest, head: SessionHead) -> Call:
    asked = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None:
        asked["max_tokens"] = limit
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Call(
        messages=body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        asked=asked,
        stop=[text for text in stop if text],
        stream=bool(body.stream),
        top_logprobs=body.top_logprobs or 0,
        version=pinned_version(gateway, body.model, head.spec.policy),
    )


# Plain


async def _plain(
    gateway: Collaborators, request: Request, body: ChatRequest, generations: list[Generation]
) -> Response:
    finished = await unless_gone(request, _all(gateway, generations))
    choices = [
        {
            "index": index,
            "message": message_of(answer),
            "logprobs": logprobs_of(gateway.renderer, generation, 0) if body.logprobs else None,
            "finish_reason": turn.finish,
            **({"token_ids": generation.ids} if body.return_token_ids else {}),
        }
        for index, (generation, (turn, answer)) in enumerate(zip(generations, finished, strict=True))
    ]
    first = generations[0]
    reply = {
        "id": first.completion_id,
        "object": "chat.completion",
        "created": int(first.started_at),
        "model": body.model or gateway.settings.model_name,
        "choices": choices,
        "usage": usage(generations),
    }
    if body.return_token_ids:
        reply["prompt_token_ids"] = first.prompt.prompt_ids.tolist()
    return Response(
        msgspec.json.encode(reply), media_type="application/json", headers=reply_headers(generations)
    )


async def _all(gateway: Collaborators, generations: list[Generation]) -> list[tuple[Turn, Answer]]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.generator.complete(each)) for each in generations]
    except* ApiError as errors:
        raise first_of(errors) from errors
    return [task.result() for task in tasks]


def first_of(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """One error for the client; choices fail for the same reason as a rule."""
    error = errors.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


# Streaming


async def _stream(
    gateway: Collaborators, request: Request, body: ChatRequest, generations: list[Generation]
) -> Response:
    """The stream begins when the engine does: an error before the first token is still a status code."""
    events = _events(gateway, body, generations)
    first = await unless_gone(request, _first_of(events))
    headers = reply_headers(generations) | {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_after(first, events), media_type="text/event-stream", headers=headers)


async def _first_of(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _after(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events) as rest:
        try:
            yield first
            async for event in rest:
                yield event
        except ApiError as error:
            yield _event_of(error)
        except Exception:  # outermost frame of a stream: a bug of ours, and the client still hears of it
            logger.exception("a stream failed")
            yield _event_of(ApiError(500, "internal error"))


def _event_of(error: ApiError) -> bytes:
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"


async def _events(
    gateway: Collaborators, body: ChatRequest, generations: list[Generation]
) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(gateway, body, generations)
    for index, generation in enumerate(generations):
        async with aclosing(_choice(gateway, chunks, index, generation)) as events:
            async for event in events:
                yield event
    if body.stream_options is not None and body.stream_options.include_usage:
        yield chunks.usage()
    yield b"data: [DONE]\n\n"


async def _choice(
    gateway: Collaborators, chunks: ChatChunks, index: int, generation: Generation
) -> AsyncGenerator[bytes, None]:
    call = generation.call
    answer_stream = AnswerStream(gateway.renderer, call.tools, generation.turn_id, call.stop)
    begun = False
    async with aclosing(gateway.generator.sample(generation)) as pieces:
        async for piece in pieces:
            if not begun:
                begun = True
                yield chunks.opening(index)
            for event in chunks.deltas(index, answer_stream.feed(piece.ids)):
                yield event
            if chunks.with_logprobs and piece.ids:
                yield chunks.logprobs(index, len(generation.ids) - len(piece.ids))
    turn, answer = await gateway.generator.record(generation)
    for event in chunks.deltas(index, answer_stream.finish(answer)):
        yield event
    yield chunks.closing(index, turn)
