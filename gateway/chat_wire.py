"""The objects of OpenAI's chat contract: messages, logprobs, usage, and the chunks of a stream."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.collaborators import Collaborators
from gateway.deltas import Delta
from gateway.generation import Generation
from gateway.render import Answer, ChatRenderer, ToolCall
from rollout_queue.records import Turn

if TYPE_CHECKING:
    from gateway.chat import ChatRequest


def message_of(answer: Answer) -> dict[str, Any]:
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


def usage(generations: list[Generation]) -> dict[str, int]:
    """A prompt counts once, however many answers it has."""
    prompt = len(generations[0].prompt.prompt_ids)
    completion = sum(len(generation.ids) for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def reply_headers(generations: list[Generation]) -> dict[str, str]:
    """What the agent may know of how its answer was made."""
    first = generations[0]
    version = first.versions[0].version if first.versions else first.first_version
    return {
        "x-weir-session-id": first.head.spec.session_id,
        "x-weir-turn-id": ",".join(generation.turn_id for generation in generations),
        "x-weir-policy-version": "" if version is None else str(version),
        "x-weir-sampling": msgspec.json.encode(first.sampling.used).decode(),
    }


class ChatChunks:
    """The chunks of one streamed reply, as server-sent events."""

    def __init__(self, gateway: Collaborators, body: "ChatRequest", generations: list[Generation]) -> None:
        self._renderer = gateway.renderer
        self._generations = generations
        self._with_ids = bool(body.return_token_ids)
        self.with_logprobs = bool(body.logprobs)
        self._envelope = {
            "id": generations[0].completion_id,
            "object": "chat.completion.chunk",
            "created": int(generations[0].started_at),
            "model": body.model or gateway.settings.model_name,
        }

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def deltas(self, index: int, deltas: list[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            if delta.reasoning:
                yield self._chunk(index, {"reasoning_content": delta.reasoning})
            elif delta.tool_call is not None:
                call = {"index": delta.index, **_tool_call(delta.tool_call)}
                yield self._chunk(index, {"tool_calls": [call]})
            else:
                yield self._chunk(index, {"content": delta.content})

    def logprobs(self, index: int, start: int) -> bytes:
        return self._chunk(index, {}, logprobs=logprobs_of(self._renderer, self._generations[index], start))

    def closing(self, index: int, turn: Turn) -> bytes:
        generation = self._generations[index]
        ids: dict[str, Any] = {"token_ids": generation.ids} if self._with_ids else {}
        top = {"prompt_token_ids": generation.prompt.prompt_ids.tolist()} if self._with_ids else {}
        return self._chunk(index, {}, top, finish_reason=turn.finish, **ids)

    def usage(self) -> bytes:
        return self._event({**self._envelope, "choices": [], "usage": usage(self._generations)})

    def _chunk(
        self, index: int, delta: dict[str, Any], top: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choices = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}]
        return self._event({**self._envelope, "choices": choices, **(top or {})})

    @staticmethod
    def _event(chunk: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
