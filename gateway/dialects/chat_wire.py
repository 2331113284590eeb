"""The objects of OpenAI's chat contract: messages, logprobs, usage, and the chunks of a stream."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.dialects.base import Answered
from gateway.dialects.wire import HEARTBEAT, event, usage_of
from gateway.generations.generation import Generation
from gateway.language.deltas import Delta
from gateway.language.render import ChatRenderer, ParsedAnswer, ToolCall
from rollout_queue.http.errors import ApiError

if TYPE_CHECKING:
    from gateway.dialects.chat import ChatRequest

_encode = msgspec.json.Encoder().encode


class ChatTelling:
    """How one chat request wants to be answered."""

    def __init__(self, renderer: ChatRenderer, body: "ChatRequest", model: str) -> None:
        self._renderer = renderer
        self._body = body
        self._model = model

    def plain(self, answered: Sequence[Answered]) -> bytes:
        generations = [each.generation for each in answered]
        reply = {
            "id": generations[0].completion_id,
            "object": "chat.completion",
            "created": int(generations[0].started_at),
            "model": self._model,
            "choices": [self._choice(index, *each) for index, each in enumerate(answered)],
            "usage": usage_of(generations, len(generations)),
        }
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = generations[0].prompt.prompt_ids.tolist()
        return _encode(reply)

    def _choice(self, index: int, generation: Generation, turn: Any, answer: ParsedAnswer) -> dict[str, Any]:
        logprobs = logprobs_of(self._renderer, generation, 0) if self._body.logprobs else None
        choice = {"index": index, "message": message_of(answer), "logprobs": logprobs}
        choice["finish_reason"] = turn.finish
        if self._body.return_token_ids:
            choice["token_ids"] = generation.ids
        return choice

    def events(self, generations: Sequence[Generation]) -> "ChatEvents":
        return ChatEvents(self._renderer, self._body, self._model, generations)


def message_of(answer: ParsedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_tool_call(call) for call in answer.tool_calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def logprobs_of(renderer: ChatRenderer, generation: Generation, start: int) -> dict[str, Any]:
    """`choices[].logprobs` of the output tokens from `start` on, as the engine returned them."""
    content = []
    for index in range(start, len(generation.ids)):
        entry = _token(renderer, generation.ids[index], generation.logprobs[index])
        tops = generation.top_logprobs[index] if generation.top_logprobs else []
        content.append({**entry, "top_logprobs": [_token(renderer, token, lp) for lp, token in tops]})
    return {"content": content, "refusal": None}


def _token(renderer: ChatRenderer, token_id: int, logprob: float) -> dict[str, Any]:
    text = renderer.text_of([token_id])
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}


class ChatEvents:
    """The chunks of one streamed reply, as server-sent events.

    What every chunk repeats is encoded once; a chunk of text costs one string.
    """

    heartbeat = HEARTBEAT

    def __init__(
        self, renderer: ChatRenderer, body: "ChatRequest", model: str, generations: Sequence[Generation]
    ) -> None:
        self._renderer = renderer
        self._generations = generations
        self._with_ids = bool(body.return_token_ids)
        self._with_logprobs = bool(body.logprobs)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        first = generations[0]
        envelope = {
            "id": first.completion_id,
            "object": "chat.completion.chunk",
            "created": int(first.started_at),
            "model": model,
        }
        self._head = b"data: " + _encode(envelope)[:-1] + b","
        choice = b'"choices":[{"index":%d,"delta":{"%s":'
        self._text = [
            (self._head + choice % (index, b"content"), self._head + choice % (index, b"reasoning_content"))
            for index in range(len(generations))
        ]

    def opening(self) -> bytes:
        """The roles, in the order of choices: clients take the first chunk of each for its beginning."""
        count = len(self._generations)
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(count))

    def piece(self, index: int, deltas: Sequence[Delta], start: int) -> bytes:
        told = b"".join([self._delta(index, delta) for delta in deltas])
        if self._with_logprobs and start < len(self._generations[index].ids):
            logprobs = logprobs_of(self._renderer, self._generations[index], start)
            told += self._chunk(index, {}, logprobs=logprobs)
        return told

    def _delta(self, index: int, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            call = {"index": delta.index, **_tool_call(delta.tool_call)}
            return self._chunk(index, {"tool_calls": [call]})
        content, reasoning = self._text[index]
        said = reasoning + _encode(delta.reasoning) if delta.reasoning else content + _encode(delta.content)
        return said + b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def closing(self, index: int, answered: Answered) -> bytes:
        more: dict[str, Any] = {}
        choice: dict[str, Any] = {"finish_reason": answered.turn.finish}
        if self._with_ids:
            more["prompt_token_ids"] = answered.generation.prompt.prompt_ids.tolist()
            choice["token_ids"] = answered.generation.ids
        return self._chunk(index, {}, more, **choice)

    def ending(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if self._with_usage:
            return self._event({"choices": [], "usage": self._usage()}) + done
        return done

    def failing(self, error: ApiError) -> bytes:
        return event(_encode(error.body))

    def _usage(self) -> dict[str, int]:
        return usage_of(self._generations, len(self._generations))

    def _chunk(
        self, index: int, delta: dict[str, Any], more: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choices = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}]
        return self._event({"choices": choices, **(more or {})})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return self._head + _encode(fields)[1:] + b"\n\n"
