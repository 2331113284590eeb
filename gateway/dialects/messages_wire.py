"""The objects of Anthropic's contract: content blocks, usage, and the named events of a stream."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.dialects.base import Answered
from gateway.dialects.wire import event
from gateway.generations.generation import Generation
from gateway.language.deltas import Delta
from gateway.language.render import ToolCall
from rollout_queue.http.errors import ApiError

RAW_ARGUMENTS = "__raw_arguments"
"""Where a call's arguments go that are no JSON object: `input` has to be one, and nothing may be lost."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}

_encode = msgspec.json.Encoder().encode


class MessagesTelling:
    """How one request wants to be answered."""

    def __init__(self, model: str, with_ids: bool) -> None:
        self._model = model
        self._with_ids = with_ids

    def plain(self, answered: Sequence[Answered]) -> bytes:
        generation, _, answer = answered[0]
        content: list[dict[str, Any]] = []
        if answer.reasoning is not None:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": input_of(call)}
            for call in answer.tool_calls
        ]
        reply = {
            **_opened(generation, self._model),
            "content": content,
            **_stopped(answered[0]),
            "usage": _usage(generation, len(generation.ids)),
        }
        return _encode(reply | (_ids(generation) if self._with_ids else {}))

    def events(self, generations: Sequence[Generation]) -> "MessagesEvents":
        return MessagesEvents(generations[0], self._model, self._with_ids)


class MessagesEvents:
    """One message as named events: its blocks open, grow and close one after another."""

    heartbeat = event(b'{"type":"ping"}', b"ping")

    def __init__(self, generation: Generation, model: str, with_ids: bool) -> None:
        self._generation = generation
        self._model = model
        self._with_ids = with_ids
        self._index = -1
        self._open: str | None = None

    def opening(self) -> bytes:
        message = {
            **_opened(self._generation, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._generation, 0),
        }
        return _event("message_start", {"message": message}) + self.heartbeat

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def _delta(self, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            return self._call(delta.tool_call)
        if delta.reasoning:
            return self._in("thinking", {"thinking": "", "signature": ""}) + self._grown(
                {"type": "thinking_delta", "thinking": delta.reasoning}
            )
        return self._in("text", {"text": ""}) + self._grown({"type": "text_delta", "text": delta.content})

    def _call(self, call: ToolCall) -> bytes:
        block = {"id": call.call_id, "name": call.name, "input": {}}
        grown = {"type": "input_json_delta", "partial_json": _encode(input_of(call)).decode()}
        return self._close() + self._in("tool_use", block) + self._grown(grown) + self._close()

    def _in(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Make sure that a block of this kind is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        block = {"type": kind, **empty}
        return closed + _event("content_block_start", {"index": self._index, "content_block": block})

    def _grown(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._index})

    def closing(self, index: int, answered: Answered) -> bytes:
        generation = answered.generation
        said = {"delta": _stopped(answered), "usage": {"output_tokens": len(generation.ids)}}
        return self._close() + _event("message_delta", said | (_ids(generation) if self._with_ids else {}))

    def ending(self) -> bytes:
        return _event("message_stop", {})

    def failing(self, error: ApiError) -> bytes:
        return _event("error", error.body)


def input_of(call: ToolCall) -> dict[str, Any]:
    with suppress(msgspec.DecodeError, RecursionError):
        arguments = msgspec.json.decode(call.arguments)
        if isinstance(arguments, dict):
            return arguments
    return {RAW_ARGUMENTS: call.arguments}


def _opened(generation: Generation, model: str) -> dict[str, Any]:
    return {"id": generation.completion_id, "type": "message", "role": "assistant", "model": model}


def _stopped(answered: Answered) -> dict[str, Any]:
    generation, turn, _ = answered
    if generation.matched is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": generation.matched}
    return {"stop_reason": STOP_REASONS[turn.finish], "stop_sequence": None}


def _usage(generation: Generation, output: int) -> dict[str, Any]:
    return {
        "input_tokens": len(generation.prompt.prompt_ids),
        "output_tokens": output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _ids(generation: Generation) -> dict[str, Any]:
    return {"prompt_token_ids": generation.prompt.prompt_ids.tolist(), "token_ids": generation.ids}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return event(_encode({"type": kind, **fields}), kind.encode())
