"""`/v1/chat/completions`: reads OpenAI's chat requests and writes their answers, whole or as a stream."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from gateway.callers.identity import Caller, user_named
from gateway.dialects.base import ParsedRequest, RecordedAnswer
from gateway.dialects.chat_input import begun_of, conversation, form_of, thinking_of, tools_of
from gateway.dialects.chat_wire import (
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    ChunkEnvelope,
    ChunkFields,
    FunctionCall,
    finish_of,
    message_of,
    tool_call_of,
)
from gateway.dialects.fields.checks import check_metadata, refuse_unserved, verbosity_of
from gateway.dialects.fields.decoding import decode_body
from gateway.dialects.fields.tables import CHAT
from gateway.dialects.logprobs import logprobs_of
from gateway.dialects.wire import (
    HEARTBEAT,
    check_sampling,
    encode,
    event,
    refuse_constrained,
    sampling_of,
    stop_strings,
    usage_of,
)
from gateway.errors import InvalidRequest
from gateway.generations.generation import Call, Generation
from gateway.language.answers.deltas import Delta
from gateway.language.constraint import constrainer, shown_tools
from gateway.language.parsed_answer import ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.http.bodies.large_bodies import worked
from rollout_queue.http.errors import ApiError


class Chat:
    """The dialect of `/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def __init__(self, renderer: ChatRenderer, model_name: str) -> None:
        self._renderer = renderer
        self._model_name = model_name

    async def read(self, caller: Caller, body: bytes, heavy: bool) -> ParsedRequest:
        return await worked(caller.payer, body, self._read, body)

    def _read(self, body: bytes) -> ParsedRequest:
        request = decode_body(body, ChatRequest, self._renderer.context_length)
        check(request)
        return ParsedRequest(
            calls=[call_of(self._renderer, request)],
            responder=ChatResponder(self._renderer, request, request.model or self._model_name),
            n=request.n or 1,
            stream=bool(request.stream),
            model=request.model,
            metadata=request.metadata,
        )

    def error(self, error: ApiError) -> bytes:
        return encode(error.body)


def check(request: ChatRequest) -> None:
    """Raises InvalidRequest for a value that the contract forbids or that this gateway does not support."""
    check_sampling(request)
    check_metadata(request.metadata)
    refuse_unserved(request, CHAT)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def call_of(renderer: ChatRenderer, request: ChatRequest) -> Call:
    """The call that the request asks for. Raises InvalidRequest for an unenforceable constraint."""
    asked = sampling_of(request, renderer.config.vocab_size)
    asked |= verbosity_of(request.verbosity, "verbosity")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit is not None:
        asked["max_tokens"] = limit
    thinking, param = thinking_of(request)
    renderer, options = renderer.thinking(thinking, param)
    messages, begun = begun_of(request, conversation(request.messages, renderer.vision is not None))
    tools, choice, parallel = tools_of(request, renderer.family)
    form, form_param = form_of(request)
    constrain = constrainer(tools, choice, form, parallel, form_param)
    constraint = constrain(renderer)
    if begun:
        refuse_constrained(constraint, "continue_final_message")
    return Call(
        messages=messages,
        begun=begun,
        tools=shown_tools(renderer, tools, choice),
        asked=asked | constraint.asked | thinking.asked,
        thinking=options,
        stop=stop_strings(request.stop),
        stream=bool(request.stream),
        top_logprobs=request.top_logprobs or 0,
        structural_tag=constraint.structural_tag,
        constrain=constrain if constraint.structural_tag else None,
        user=user_named(request.user),
    )


class ChatResponder:
    """Writes the reply to one chat request."""

    def __init__(self, renderer: ChatRenderer, request: ChatRequest, model: str) -> None:
        self._renderer = renderer
        self._request = request
        self._model = model

    def body(self, recorded: Sequence[RecordedAnswer]) -> bytes:
        generations = [each.generation for each in recorded]
        first, with_ids = generations[0], self._request.return_token_ids
        completion = ChatCompletion(
            id=first.completion_id,
            created=int(first.started_at),
            model=self._model,
            choices=[self._choice(index, each) for index, each in enumerate(recorded)],
            usage=usage_of(generations, len(generations)),
            prompt_token_ids=first.prompt.prompt_ids.tolist() if with_ids else UNSET,
        )
        return encode(completion)

    def _choice(self, index: int, recorded: RecordedAnswer) -> ChatChoice:
        generation, turn, answer = recorded
        logprobs = None
        if self._request.logprobs:
            logprobs = ChatLogprobs(logprobs_of(self._renderer, generation, range(len(generation.ids))))
        return ChatChoice(
            index=index,
            message=message_of(answer, bool(self._request.functions)),
            logprobs=logprobs,
            finish_reason=finish_of(turn.finish, bool(self._request.functions)),
            token_ids=generation.ids if self._request.return_token_ids else UNSET,
        )

    def events(self, generations: Sequence[Generation]) -> "ChatEvents":
        return ChatEvents(self._renderer, self._request, self._model, generations)


class ChatEvents:
    """The chunks of one streamed reply, as server-sent events.

    The fields that every chunk repeats are encoded once; for a chunk of text only its string is encoded.
    """

    heartbeat = HEARTBEAT

    def __init__(
        self, renderer: ChatRenderer, request: ChatRequest, model: str, generations: Sequence[Generation]
    ) -> None:
        self._renderer = renderer
        self._generations = generations
        self._with_ids = bool(request.return_token_ids)
        self._with_logprobs = bool(request.logprobs)
        self._with_functions = bool(request.functions)
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        first = generations[0]
        envelope = ChunkEnvelope(id=first.completion_id, created=int(first.started_at), model=model)
        self._head = b"data: " + encode(envelope)[:-1] + b","
        choice = b'"choices":[{"index":%d,"delta":{"%s":'
        self._text = [
            (self._head + choice % (index, b"content"), self._head + choice % (index, b"reasoning_content"))
            for index in range(len(generations))
        ]

    def opening(self) -> bytes:
        """The roles, in the order of choices: clients expect them in the first chunk of each choice."""
        delta = ChatDelta(role="assistant", content="")
        choices = [ChunkChoice(index=index, delta=delta) for index in range(len(self._generations))]
        return b"".join([self._chunk(choice) for choice in choices])

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        events = b"".join([self._delta(index, delta) for delta in deltas])
        if self._with_logprobs and tokens:
            logprobs = ChatLogprobs(logprobs_of(self._renderer, self._generations[index], tokens))
            events += self._chunk(ChunkChoice(index=index, logprobs=logprobs))
        return events

    def _delta(self, index: int, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._chunk(ChunkChoice(index=index, delta=self._call(delta.tool_call, delta.index)))
        content, reasoning = self._text[index]
        head = reasoning + encode(delta.reasoning) if delta.reasoning else content + encode(delta.content)
        return head + b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _call(self, call: ToolCall, number: int) -> ChatDelta:
        if self._with_functions:
            return ChatDelta(function_call=FunctionCall(call.name, call.arguments))
        return ChatDelta(tool_calls=[tool_call_of(call, number)])

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        generation, finish = recorded.generation, finish_of(recorded.turn.finish, self._with_functions)
        if not self._with_ids:
            return self._chunk(ChunkChoice(index=index, finish_reason=finish))
        choice = ChunkChoice(index=index, finish_reason=finish, token_ids=generation.ids)
        return self._chunk(choice, generation.prompt.prompt_ids.tolist())

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._with_usage:
            usage = usage_of(self._generations, len(self._generations))
            return self._event(ChunkFields(choices=(), usage=usage)) + done
        return done

    def failing(self, error: ApiError) -> bytes:
        return event(encode(error.body))

    def _chunk(self, choice: ChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        return self._event(ChunkFields(choices=(choice,), prompt_token_ids=prompt_ids))

    def _event(self, fields: ChunkFields) -> bytes:
        return self._head + encode(fields)[1:] + b"\n\n"
