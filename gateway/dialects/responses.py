"""`/v1/responses`: reads OpenAI's Responses requests and writes their answers, whole or as a stream."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import Raw
from redis.asyncio import Redis

from gateway.callers.identity import Caller, user_named
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.dialects.body_decoding import decode_body
from gateway.dialects.fields import (
    ITEMS,
    REASONING,
    RESPONSES,
    TEXT,
    check_choice,
    check_fields,
    check_format,
    check_metadata,
    note_unknown,
    refuse_unserved,
    verbosity_of,
)
from gateway.dialects.logprobs import logprobs_of
from gateway.dialects.responses_events import ResponsesEvents, final_state, head_of, output_of
from gateway.dialects.responses_input import functions_of, kind_of, left_out_of, messages_of
from gateway.dialects.responses_wire import LOGPROBS, PREFIX, Item, ResponsesRequest
from gateway.dialects.stored_responses import (
    BackgroundResponse,
    ResponseStore,
    StoredConversation,
    StoredResponse,
)
from gateway.dialects.wire import JsonObject, check_sampling, encode, given_fields, left_out
from gateway.errors import invalid
from gateway.generations.generation import Call, Generation
from gateway.language.chat_messages import Message, in_call_order
from gateway.language.constraint import constraint_of, shown_tools
from gateway.language.render import ChatRenderer
from gateway.language.thinking import ThinkingChoice, effort_of
from rollout_queue.http.errors import ApiError
from rollout_queue.http.json_routes import worked

INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
"""Values of `include`. Reasoning is not encrypted, so a client always has its text. Calls of tools that
OpenAI's servers run do not occur here."""
EFFORT = "reasoning.effort"
FORMAT = "text.format"
"""The field that corresponds to `response_format` of the chat contract."""


class Responses:
    """The dialect of `/v1/responses`."""

    prefix = PREFIX

    def __init__(self, renderer: ChatRenderer, model_name: str, redis: Redis) -> None:
        self._renderer = renderer
        self._model_name = model_name
        self._redis = redis

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        context_length = self._renderer.context_length
        request = await worked(caller.payer, body, decode_body, body, ResponsesRequest, context_length)
        check(request)
        model = request.model or self._model_name
        store, previous_id = ResponseStore(self._redis, caller), request.previous_response_id
        past = await store.conversation(previous_id) if previous_id else StoredConversation()
        items = await _resolved(store, _given_items(request.input))
        added = await worked(caller.payer, body, messages_of, items, self._renderer.vision is not None)
        instructions: list[Message] = (
            [{"role": "system", "content": request.instructions}] if request.instructions else []
        )

        def head(generation: Generation) -> JsonObject:
            told: JsonObject = msgspec.to_builtins(head_of(request, model, generation))
            return told

        async def keep(recorded: RecordedAnswer, replacing: StoredResponse | None = None) -> None:
            generation, output = recorded.generation, msgspec.to_builtins(output_of(recorded))
            state = final_state(recorded, (), with_ids=False)
            told = {**head(generation), **msgspec.to_builtins(state)}
            await store.keep(past, bool(instructions), generation, output, told, replacing)

        async def keep_only(recorded: Sequence[RecordedAnswer]) -> None:
            await keep(recorded[0])

        messages = [*instructions, *past.messages, *added]
        return ParsedRequest(
            calls=[await worked(caller.payer, body, call_of, self._renderer, request, messages, items)],
            responder=ResponsesResponder(self._renderer, request, model),
            stream=bool(request.stream),
            model=request.model,
            metadata=request.metadata,
            session_id=past.session_id,
            store=None if request.store is False else keep_only,
            background=BackgroundResponse(self._redis, head, keep) if request.background else None,
        )

    def error(self, error: ApiError) -> bytes:
        return encode(error.body)


class ResponsesResponder:
    """Writes the reply to one request."""

    def __init__(self, renderer: ChatRenderer, request: ResponsesRequest, model: str) -> None:
        self._renderer = renderer
        self._request = request
        self._model = model

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        (only,) = recorded
        logprobs: Sequence[Raw] = ()
        if self._request.with_logprobs:
            logprobs = logprobs_of(self._renderer, only.generation, range(len(only.generation.ids)))
        with_ids = bool(self._request.return_token_ids)
        state = final_state(only, output_of(only, logprobs), with_ids)
        head = head_of(self._request, self._model, only.generation)
        return encode(head)[:-1] + b"," + encode(state)[1:]

    def events(self, generations: Sequence[Generation]) -> ResponsesEvents:
        (generation,) = generations
        return ResponsesEvents(self._renderer, self._request, self._model, generation)


def check(request: ResponsesRequest) -> None:
    """Raises InvalidRequest for a value that the contract forbids or that this gateway does not support."""
    check_sampling(request)
    check_metadata(request.metadata)
    refuse_unserved(request, RESPONSES)
    for index, value in enumerate(request.include or ()):
        if value not in INCLUDED:  # it asks for more in the reply, and changes nothing else
            note_unknown(f"include[{index}]")
    check_fields(request.text or {}, TEXT, "text")
    check_format((request.text or {}).get("format"), FORMAT)
    check_choice(request.tool_choice)
    if not isinstance((request.text or {}).get("format"), dict | None):
        raise invalid(FORMAT, "not an object")
    if request.background and request.stream:
        raise invalid("stream", "an answer in the background is read by its id")
    if request.background and request.store is False:
        raise invalid("store", "an answer in the background is stored")
    if not request.input and not request.previous_response_id:
        raise invalid("input", "give text, or at least one item")


def thinking_of(request: ResponsesRequest) -> ThinkingChoice:
    """What the request asks of the model's thinking. Raises InvalidRequest."""
    reasoning = request.reasoning or {}
    check_fields(reasoning, REASONING, "reasoning")
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            raise invalid(f"reasoning.{name}", "thoughts are shown whole, not as summaries")
    return effort_of(reasoning.get("effort"), EFFORT)


def _given_items(given: str | list[Item] | None) -> list[Item]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given or []


async def _resolved(store: ResponseStore, items: list[Item]) -> list[Item]:
    """The items, with stored items in place of references. Raises InvalidRequest for an unknown reference."""
    wanted = {index: item.get("id") for index, item in enumerate(items) if kind_of(item) == "item_reference"}
    if not wanted:
        return items
    for index in wanted:
        check_fields(items[index], ITEMS["item_reference"], f"input[{index}]")
    stored = await store.items([name for name in wanted.values() if isinstance(name, str)])
    for index, name in wanted.items():
        if not isinstance(name, str) or name not in stored:
            where = f"input[{index}].id"
            raise invalid(where, f"no item {name!r} is stored")
    return [stored[str(wanted[index])] if index in wanted else item for index, item in enumerate(items)]


def call_of(
    renderer: ChatRenderer, request: ResponsesRequest, messages: Sequence[Message], items: Sequence[Item]
) -> Call:
    """The call that the request asks for; the last of its messages are those of `items`.

    Raises InvalidRequest for a malformed tool, and for a constraint that no engine can enforce.
    """
    asked = given_fields(request, ("temperature", "top_p"))
    asked |= verbosity_of((request.text or {}).get("verbosity"), "text.verbosity")
    if request.max_output_tokens is not None:
        asked["max_tokens"] = request.max_output_tokens
    thinking = thinking_of(request)
    renderer, options = renderer.thinking(thinking, EFFORT)
    tools = functions_of(request.tools)
    form = (request.text or {}).get("format")
    constrain = partial(
        constraint_of,
        tools=tools,
        tool_choice=request.tool_choice,
        response_format=form,
        parallel_tool_calls=request.parallel_tool_calls,
        format_param=FORMAT,
    )
    constraint = constrain(renderer)
    return Call(
        messages=in_call_order(messages),
        tools=shown_tools(renderer, tools, request.tool_choice),
        asked=asked | constraint.asked | thinking.asked | left_out(left_out_of(request.tools, items)),
        thinking=options,
        stream=bool(request.stream),
        top_logprobs=request.top_logprobs or 0,
        structural_tag=constraint.structural_tag,
        constrain=constrain if constraint.structural_tag else None,
        user=user_named(request.user),
    )
