"""`/v1/responses`: OpenAI's Responses wire shape to calls and back, plain and streaming."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.dialects.base import Answered, Ask
from gateway.dialects.responses_input import Item, functions_of, kind_of, messages_of
from gateway.dialects.responses_store import Past, ResponseStore
from gateway.dialects.responses_telling import ResponsesTelling
from gateway.dialects.responses_wire import PREFIX, output_of
from gateway.dialects.wire import check_sampling, decode_body, wished
from gateway.edge.request import Arrival
from gateway.generations.generation import Call
from gateway.language.constraint import constraint_of
from gateway.language.render import ChatRenderer, Message, Tool
from gateway.sessions.identity import Caller
from gateway.sessions.user_names import user_named
from rollout_queue.http.errors import ApiError

LOGPROBS = "message.output_text.logprobs"
"""What `include` calls them."""
FORMAT = "text.format"
"""What chats call `response_format`."""


class ResponsesRequest(msgspec.Struct):
    """The fields of OpenAI's contract that change what is done or are told back; others are tolerated."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    store: bool | None = True
    background: bool | None = False
    conversation: Any = None
    prompt: Any = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = False

    @property
    def with_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


class Responses:
    """The dialect of `/v1/responses`."""

    prefix = PREFIX

    async def read(self, gateway: Collaborators, caller: Caller, arrival: Arrival) -> Ask:
        body = decode_body(arrival.body, ResponsesRequest)
        check(body)
        store = ResponseStore(gateway.redis, caller)
        past = await store.past(body.previous_response_id) if body.previous_response_id else Past()
        said = messages_of(await _resolved(store, items_of(body.input)))
        instructions: list[Message] = (
            [{"role": "system", "content": body.instructions}] if body.instructions else []
        )

        async def keep(answered: Sequence[Answered]) -> None:
            await store.keep(past, bool(instructions), answered[0], output_of(answered[0]))

        return Ask(
            calls=[call_of(gateway.renderer, body, [*instructions, *past.messages, *said])],
            telling=ResponsesTelling(gateway.renderer, body, body.model or gateway.settings.model_name),
            stream=bool(body.stream),
            model=body.model,
            metadata=body.metadata,
            session_id=past.session_id,
            keep=None if body.store is False else keep,
        )

    def error(self, error: ApiError) -> bytes:
        return msgspec.json.encode(error.body)


def check(body: ResponsesRequest) -> None:
    """Raises ApiError 400 for values outside the contract, or that this gateway does not serve."""
    check_sampling(body)
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name):
            raise ApiError(400, f"{name}: this gateway does not serve it", param=name)
    if not isinstance((body.text or {}).get("format"), dict | None):
        raise ApiError(400, f"{FORMAT}: not an object", param=FORMAT)
    if not body.input and not body.previous_response_id:
        raise ApiError(400, "input: give text, or at least one item", param="input")


def items_of(given: str | list[Item] | None) -> list[Item]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given or []


async def _resolved(store: ResponseStore, items: list[Item]) -> list[Item]:
    """The items, with what they refer to in the place of references. Raises ApiError 400."""
    wanted = {index: item.get("id") for index, item in enumerate(items) if kind_of(item) == "item_reference"}
    if not wanted:
        return items
    kept = await store.items([name for name in wanted.values() if isinstance(name, str)])
    for index, name in wanted.items():
        if not isinstance(name, str) or name not in kept:
            where = f"input[{index}].id"
            raise ApiError(400, f"{where}: no item {name!r} is stored", param=where)
    return [kept[str(wanted[index])] if index in wanted else item for index, item in enumerate(items)]


def call_of(renderer: ChatRenderer, body: ResponsesRequest, messages: Sequence[Message]) -> Call:
    """Raises ApiError 400 for a tool that is none, and for what no engine could keep to."""
    asked = wished(body, ("temperature", "top_p"))
    if body.max_output_tokens is not None:
        asked["max_tokens"] = body.max_output_tokens
    tools = functions_of(body.tools)
    form = (body.text or {}).get("format")
    constraint = constraint_of(
        renderer, tools, body.tool_choice, form, body.parallel_tool_calls, format_param=FORMAT
    )
    return Call(
        messages=messages,
        tools=None if body.tool_choice == "none" else tools,
        asked=asked | constraint.asked,
        stream=bool(body.stream),
        top_logprobs=body.top_logprobs or 0,
        constraint=constraint.parameters,
        user=user_named(body.user),
    )
