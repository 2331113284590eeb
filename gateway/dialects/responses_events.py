"""The typed and numbered events of a streamed response.

response.created, in_progress ▸ for each item: output_item.added, its deltas, output_item.done ▸ completed

The message item stays open until the end, since a model may continue its text after a tool call.

The output of a response: the fields it begins with, the items of an answer, and their state and usage.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw

from gateway.dialects.base import RecordedAnswer
from gateway.dialects.logprobs import logprobs_of
from gateway.dialects.responses_wire import (
    PREFIX,
    ArgumentsDelta,
    ArgumentsDone,
    CachedTokens,
    ContentPartAdded,
    ContentPartDone,
    ErrorEvent,
    ErrorFields,
    FunctionCallItem,
    Incomplete,
    MessageItem,
    NumberedEvent,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputPart,
    OutputText,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDone,
    ReasoningTokens,
    ResponseEventHead,
    ResponseHead,
    ResponsesRequest,
    ResponseState,
    ResponseUsage,
)
from gateway.dialects.wire import HEARTBEAT, encode, event
from gateway.generations.generation import Generation
from gateway.language.deltas import Delta
from gateway.language.parsed_answer import ToolCall
from gateway.language.render import ChatRenderer
from rollout_queue.http.errors import ApiError


def output_of(recorded: RecordedAnswer, logprobs: Sequence[Raw] = ()) -> list[OutputItem]:
    """The items of an answer. An empty answer becomes an empty message, so the client can send it back."""
    generation, turn, answer = recorded
    cut = turn.finish == "length"
    output: list[OutputItem] = []
    if reasoning := (answer.reasoning or "").lstrip():  # streams leave leading blanks out as well
        done = not cut or answer.content or answer.tool_calls
        output.append(reasoning_item(generation, reasoning, "completed" if done else "incomplete"))
    if answer.content or not answer.tool_calls:
        status = "incomplete" if cut else "completed"
        output.append(message_item(generation, answer.content, status, logprobs))
    return output + [call_item(generation, index, call) for index, call in enumerate(answer.tool_calls)]


def final_state(recorded: RecordedAnswer, output: Sequence[OutputItem], with_ids: bool) -> ResponseState:
    """The state of a response whose answer is recorded; `with_ids` adds the token ids."""
    generation, turn, _ = recorded
    cut = turn.finish == "length"
    return ResponseState(
        status="incomplete" if cut else "completed",
        completed_at=None if cut else int(turn.finished_at),
        incomplete_details=Incomplete() if cut else None,
        output=output,
        usage=_usage(generation),
        prompt_token_ids=generation.prompt.prompt_ids.tolist() if with_ids else UNSET,
        token_ids=generation.ids if with_ids else UNSET,
    )


def reasoning_item(generation: Generation, text: str | None, status: str) -> ReasoningItem:
    """The item of the model's reasoning. `text` is None for the item at its beginning."""
    content = () if text is None else (ReasoningText(text),)
    return ReasoningItem(id="rs_" + _name(generation), content=content, status=status)


def message_item(
    generation: Generation, text: str | None, status: str, logprobs: Sequence[Raw] = ()
) -> MessageItem:
    """The item of the model's answer. `text` is None for the item at its beginning."""
    content = () if text is None else (OutputText(text, logprobs=logprobs),)
    return MessageItem(id="msg_" + _name(generation), content=content, status=status)


def call_item(generation: Generation, index: int, call: ToolCall) -> FunctionCallItem:
    """The item of the model's tool call number `index`."""
    return FunctionCallItem(
        id=f"fc_{_name(generation)}_{index}",
        call_id=call.call_id,
        name=call.name,
        arguments=call.arguments,
    )


def head_of(request: ResponsesRequest, model: str, generation: Generation) -> ResponseHead:
    """The fields of the response that its first event already contains."""
    used = generation.sampling.used
    text = {name: value for name, value in (request.text or {}).items() if value is not None}
    return ResponseHead(
        id=generation.completion_id,
        created_at=int(generation.started_at),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning,
        safety_identifier=request.safety_identifier,
        user=request.user,
        background=bool(request.background),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        store=request.store is not False,
        temperature=used["temperature"],
        text={"format": {"type": "text"}, **text},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=used["top_p"],
    )


def _name(generation: Generation) -> str:
    return generation.completion_id.removeprefix(PREFIX)


def _usage(generation: Generation) -> ResponseUsage:
    prompt, completion = len(generation.prompt.prompt_ids), len(generation.ids)
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=CachedTokens(generation.cached_tokens),
        output_tokens=completion,
        output_tokens_details=ReasoningTokens(generation.reasoning_tokens),
        total_tokens=prompt + completion,
    )


class ResponsesEvents:
    """The events of one streamed response."""

    heartbeat = HEARTBEAT

    def __init__(
        self, renderer: ChatRenderer, request: ResponsesRequest, model: str, generation: Generation
    ) -> None:
        self._renderer = renderer
        self._generation = generation
        self._with_ids = bool(request.return_token_ids)
        self._with_logprobs = request.with_logprobs
        self._head = encode(head_of(request, model, generation))[:-1] + b","
        self._number = 0
        """The sequence number of the next event."""
        self._output: list[OutputItem] = []
        """The items so far. An item whose text is still streamed has its first state, without text."""
        self._reasoning: _OpenText | None = None
        self._message: _OpenText | None = None
        self._unsent = range(0)
        """The output tokens whose logprobs were not sent yet, by their place."""
        self._recorded: RecordedAnswer | None = None

    def opening(self) -> bytes:
        state = ResponseState()
        return self._response("response.created", state) + self._response("response.in_progress", state)

    def piece(self, index: int, deltas: Sequence[Delta], tokens: range) -> bytes:
        if tokens:
            self._unsent = range(self._unsent.start, tokens.stop)
        return b"".join([self._delta(delta) for delta in deltas])

    def closing(self, index: int, recorded: RecordedAnswer) -> bytes:
        self._recorded = recorded
        cut, answer = recorded.turn.finish == "length", recorded.answer
        events = self._end_reasoning("incomplete" if cut and len(self._output) == 1 else "completed")
        if self._message is not None or answer.content or not answer.tool_calls:
            events += self._end_message(answer.content, "incomplete" if cut else "completed")
        return events

    def ending(self) -> bytes:
        assert self._recorded is not None  # noqa: S101 - a stream ends after its answer
        state = final_state(self._recorded, self._output, self._with_ids)
        return self._response(f"response.{state.status}", state)

    def failing(self, error: ApiError) -> bytes:
        """The error event. Some clients require a `code`, so an error without one gets its type as code."""
        code = error.code or error.type
        return self._event(
            ErrorEvent(
                sequence_number=self._number,
                code=code,
                message=error.message,
                param=error.param,
                error=ErrorFields(error.message, error.type, error.param, code),
            )
        )

    def _delta(self, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._end_reasoning("completed") + self._call(delta.index, delta.tool_call)
        if delta.reasoning:
            return self._add_reasoning(delta.reasoning)
        events = self._end_reasoning("completed")
        message, begun = self._open_message()
        logprobs: list[Raw] = []
        if self._with_logprobs:
            logprobs = logprobs_of(self._renderer, self._generation, self._unsent)
            self._unsent = range(self._unsent.stop, self._unsent.stop)
        return events + begun + self._add(message, delta.content, logprobs)

    def _add_reasoning(self, text: str) -> bytes:
        events = b""
        if self._reasoning is None:
            item = reasoning_item(self._generation, None, "in_progress")
            self._reasoning, events = self._begin(item, "reasoning_text", ReasoningText(""))
        if self._reasoning.ended:
            return events  # reasoning after the answer began is not streamed: its item has ended
        return events + self._add(self._reasoning, text)

    def _end_reasoning(self, status: str) -> bytes:
        opened = self._reasoning
        if opened is None or opened.ended:
            return b""
        text = "".join(opened.parts)
        done = ReasoningTextDone(
            sequence_number=self._number, item_id=opened.item_id, output_index=opened.output_index, text=text
        )
        events = self._event(done)
        return events + self._end(opened, reasoning_item(self._generation, text, status), ReasoningText(text))

    def _open_message(self) -> tuple["_OpenText", bytes]:
        """The message item, and the events that begin it; no events if it has begun."""
        events = b""
        if self._message is None:
            item = message_item(self._generation, None, "in_progress")
            self._message, events = self._begin(item, "output_text", OutputText(""))
        return self._message, events

    def _end_message(self, text: str, status: str) -> bytes:
        """End the message with the recorded text, which the client then sends back in its next call."""
        message, begun = self._open_message()
        logprobs: list[Raw] = []
        if self._with_logprobs:
            logprobs = logprobs_of(self._renderer, self._generation, range(len(self._generation.ids)))
        item = message_item(self._generation, text, status, logprobs)
        done = OutputTextDone(
            sequence_number=self._number,
            item_id=message.item_id,
            output_index=message.output_index,
            text=text,
            logprobs=logprobs,
        )
        events = begun + self._event(done)
        return events + self._end(message, item, OutputText(text, logprobs=logprobs))

    def _call(self, index: int, call: ToolCall) -> bytes:
        item, position = call_item(self._generation, index, call), len(self._output)
        self._output.append(item)
        begun = msgspec.structs.replace(item, arguments="", status="in_progress")
        number, item_id = self._number, item.id
        events: tuple[NumberedEvent, ...] = (
            OutputItemAdded(sequence_number=number, output_index=position, item=begun),
            ArgumentsDelta(
                sequence_number=number + 1, item_id=item_id, output_index=position, delta=call.arguments
            ),
            ArgumentsDone(
                sequence_number=number + 2,
                item_id=item_id,
                output_index=position,
                name=call.name,
                arguments=call.arguments,
            ),
            OutputItemDone(sequence_number=number + 3, output_index=position, item=item),
        )
        return b"".join(map(self._event, events))

    def _begin(self, item: OutputItem, kind: str, part: OutputPart) -> tuple["_OpenText", bytes]:
        opened = _OpenText(item.id, len(self._output), kind)
        self._output.append(item)
        added = OutputItemAdded(sequence_number=self._number, output_index=opened.output_index, item=item)
        begun = ContentPartAdded(
            sequence_number=self._number + 1, item_id=item.id, output_index=opened.output_index, part=part
        )
        return opened, self._event(added) + self._event(begun)

    def _add(self, opened: "_OpenText", text: str, logprobs: Sequence[Raw] | None = None) -> bytes:
        opened.parts.append(text)
        self._number += 1
        delta = opened.head + b'"sequence_number":%d,"delta":' % (self._number - 1) + encode(text)
        return delta + (b"" if logprobs is None else b',"logprobs":' + encode(logprobs)) + b"}\n\n"

    def _end(self, opened: "_OpenText", item: OutputItem, part: OutputPart) -> bytes:
        opened.ended = True
        index = opened.output_index
        self._output[index] = item
        ended = ContentPartDone(
            sequence_number=self._number, item_id=opened.item_id, output_index=index, part=part
        )
        done = OutputItemDone(sequence_number=self._number + 1, output_index=index, item=item)
        return self._event(ended) + self._event(done)

    def _event(self, numbered: NumberedEvent) -> bytes:
        self._number += 1
        return event(encode(numbered), str(numbered.__struct_config__.tag).encode())

    def _response(self, kind: str, state: ResponseState) -> bytes:
        """An event that contains the whole response. The response's constant fields are encoded once."""
        head = ResponseEventHead(
            type=kind,
            sequence_number=self._number,
            prompt_token_ids=state.prompt_token_ids,
            token_ids=state.token_ids,
        )
        self._number += 1
        response = self._head + encode(state)[1:]
        return event(encode(head)[:-1] + b',"response":' + response + b"}", kind.encode())


class _OpenText:
    """An item of text that is being streamed. The fields that its deltas repeat are encoded once."""

    def __init__(self, item_id: str, output_index: int, kind: str) -> None:
        self.item_id = item_id
        self.output_index = output_index
        self.parts: list[str] = []
        self.ended = False
        name = f"response.{kind}.delta"
        where = {"type": name, "item_id": item_id, "output_index": output_index, "content_index": 0}
        self.head = f"event: {name}\ndata: ".encode() + encode(where)[:-1] + b","
