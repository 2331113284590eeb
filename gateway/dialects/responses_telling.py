"""How a Responses request is answered: one object, or the typed and numbered events of a stream.

response.created, in_progress ▸ for each item: output_item.added, its deltas, output_item.done ▸ completed

The message stays open until the end, since a model may go on talking after a tool call.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.dialects.base import Answered
from gateway.dialects.chat_wire import logprobs_of
from gateway.dialects.responses_input import Item
from gateway.dialects.responses_wire import (
    STARTED,
    call_item,
    ending_of,
    ids_of,
    message_item,
    opening_of,
    output_of,
    reasoning_item,
    reasoning_part,
    text_part,
)
from gateway.dialects.wire import HEARTBEAT, event
from gateway.generations.generation import Generation
from gateway.language.deltas import Delta
from gateway.language.render import ChatRenderer, ToolCall
from rollout_queue.http.errors import ApiError

if TYPE_CHECKING:
    from gateway.dialects.responses import ResponsesRequest

_encode = msgspec.json.Encoder().encode


class ResponsesTelling:
    """How one request wants to be answered."""

    def __init__(self, renderer: ChatRenderer, body: "ResponsesRequest", model: str) -> None:
        self._renderer = renderer
        self._body = body
        self._model = model

    def plain(self, answered: Sequence[Answered]) -> bytes:
        (done,) = answered
        response = opening_of(self._body, self._model, done.generation)
        logprobs = logprobs_from(self._renderer, done.generation, 0) if self._body.with_logprobs else ()
        response |= ending_of(self._renderer, done, output_of(done, logprobs))
        if self._body.return_token_ids:
            response |= ids_of(done.generation)
        return _encode(response)

    def events(self, generations: Sequence[Generation]) -> "ResponsesEvents":
        (generation,) = generations
        return ResponsesEvents(self._renderer, self._body, self._model, generation)


def logprobs_from(renderer: ChatRenderer, generation: Generation, start: int) -> list[Item]:
    """Every output token from `start` on, as the engine returned it; also what is no text of the message."""
    content: list[Item] = logprobs_of(renderer, generation, start)["content"]
    return content


class ResponsesEvents:
    """The events of one streamed response."""

    heartbeat = HEARTBEAT

    def __init__(
        self, renderer: ChatRenderer, body: "ResponsesRequest", model: str, generation: Generation
    ) -> None:
        self._renderer = renderer
        self._generation = generation
        self._with_ids = bool(body.return_token_ids)
        self._with_logprobs = body.with_logprobs
        self._opening = _encode(opening_of(body, model, generation))[:-1] + b","
        self._number = 0
        self._output: list[Item] = []
        """The items so far; one that is open stands there as it began."""
        self._thoughts: _Passage | None = None
        self._message: _Passage | None = None
        self._told_logprobs = 0
        self._answered: Answered | None = None

    def opening(self) -> bytes:
        return self._whole("response.created", STARTED) + self._whole("response.in_progress", STARTED)

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def closing(self, index: int, answered: Answered) -> bytes:
        self._answered = answered
        cut, answer = answered.turn.finish == "length", answered.answer
        told = self._end_thoughts("incomplete" if cut and len(self._output) == 1 else "completed")
        if self._message is not None or answer.content or not answer.tool_calls:
            told += self._end_message(answer.content, "incomplete" if cut else "completed")
        return told

    def ending(self) -> bytes:
        assert self._answered is not None  # noqa: S101 - a stream ends after its answer
        fields = ending_of(self._renderer, self._answered, self._output)
        ids = ids_of(self._generation) if self._with_ids else {}
        return self._whole(f"response.{fields['status']}", fields | ids, ids)

    def failing(self, error: ApiError) -> bytes:
        """In the contract's shape beside OpenAI's own; some clients insist on a code that is text."""
        body = error.body["error"] | {"code": error.code or error.type}
        flat = {name: body[name] for name in ("code", "message", "param")}
        return event(
            _encode({"type": "error", "sequence_number": self._number, **flat, "error": body}), b"error"
        )

    def _delta(self, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._end_thoughts("completed") + self._call(delta.index, delta.tool_call)
        if delta.reasoning:
            return self._think(delta.reasoning)
        told = self._end_thoughts("completed")
        message, begun = self._talking()
        logprobs: list[Item] = []
        if self._with_logprobs:
            logprobs = logprobs_from(self._renderer, self._generation, self._told_logprobs)
            self._told_logprobs = len(self._generation.ids)
        return told + begun + self._add(message, delta.content, logprobs)

    def _think(self, text: str) -> bytes:
        told = b""
        if self._thoughts is None:
            item = reasoning_item(self._generation, None, "in_progress")
            self._thoughts, told = self._begin(item, "reasoning_text", reasoning_part(""))
        if self._thoughts.ended:
            return told  # a thought after the answer began: what was told is not taken back
        return told + self._add(self._thoughts, text)

    def _end_thoughts(self, status: str) -> bytes:
        passage = self._thoughts
        if passage is None or passage.ended:
            return b""
        text = "".join(passage.said)
        item = reasoning_item(self._generation, text, status)
        return self._end(passage, item, reasoning_part(text))

    def _talking(self) -> tuple["_Passage", bytes]:
        """The message, and the events that begin it where it has not begun."""
        told = b""
        if self._message is None:
            item = message_item(self._generation, None, "in_progress")
            self._message, told = self._begin(item, "output_text", text_part(""))
        return self._message, told

    def _end_message(self, text: str, status: str) -> bytes:
        """With the answer as it is recorded: what the client sends back is what the model said."""
        message, begun = self._talking()
        logprobs: list[Item] = []
        if self._with_logprobs:
            logprobs = logprobs_from(self._renderer, self._generation, 0)
        item = message_item(self._generation, text, status, logprobs)
        return begun + self._end(message, item, text_part(text, logprobs), logprobs=logprobs)

    def _call(self, index: int, call: ToolCall) -> bytes:
        item, place = call_item(self._generation, index, call), len(self._output)
        self._output.append(item)
        begun = item | {"arguments": "", "status": "in_progress"}
        where = {"item_id": item["id"], "output_index": place}
        kind = "response.function_call_arguments"
        return (
            self._event("response.output_item.added", output_index=place, item=begun)
            + self._event(f"{kind}.delta", **where, delta=call.arguments)
            + self._event(f"{kind}.done", **where, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=place, item=item)
        )

    def _begin(self, item: Item, kind: str, part: Item) -> tuple["_Passage", bytes]:
        passage = _Passage(item["id"], len(self._output), kind)
        self._output.append(item)
        return passage, (
            self._event("response.output_item.added", output_index=passage.output_index, item=item)
            + self._event("response.content_part.added", **passage.where, part=part)
        )

    def _add(self, passage: "_Passage", text: str, logprobs: Sequence[Any] | None = None) -> bytes:
        passage.said.append(text)
        self._number += 1
        told = passage.head + b'"sequence_number":%d,"delta":' % (self._number - 1) + _encode(text)
        return told + (b"" if logprobs is None else b',"logprobs":' + _encode(logprobs)) + b"}\n\n"

    def _end(self, passage: "_Passage", item: Item, part: Item, **more: Any) -> bytes:
        passage.ended = True
        self._output[passage.output_index] = item
        return (
            self._event(f"response.{passage.kind}.done", **passage.where, text=part["text"], **more)
            + self._event("response.content_part.done", **passage.where, part=part)
            + self._event("response.output_item.done", output_index=passage.output_index, item=item)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event(_encode({"type": kind, "sequence_number": self._number - 1, **fields}), kind.encode())

    def _whole(self, kind: str, fields: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        """An event that carries the whole response; what never changes in it is encoded once."""
        head = _encode({"type": kind, "sequence_number": self._number, **(beside or {})})[:-1]
        self._number += 1
        response = self._opening + _encode(fields)[1:]
        return event(head + b',"response":' + response + b"}", kind.encode())


class _Passage:
    """An item of text while it is told; what its deltas repeat is encoded once."""

    def __init__(self, item_id: str, output_index: int, kind: str) -> None:
        self.output_index = output_index
        self.kind = kind
        self.where = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self.said: list[str] = []
        self.ended = False
        name = f"response.{kind}.delta"
        self.head = f"event: {name}\ndata: ".encode() + _encode({"type": name, **self.where})[:-1] + b","
