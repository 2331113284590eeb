"""The objects of OpenAI's Responses contract: a response, the items of its output, its usage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gateway.dialects.base import Answered
from gateway.dialects.responses_input import Item
from gateway.generations.generation import Generation
from gateway.language.render import ChatRenderer, ToolCall

if TYPE_CHECKING:
    from gateway.dialects.responses import ResponsesRequest

PREFIX = "resp_"
ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "user",
)


def opening_of(body: "ResponsesRequest", model: str, generation: Generation) -> dict[str, Any]:
    """What a response says from its first event on."""
    used = generation.sampling.used
    return {
        "id": generation.completion_id,
        "object": "response",
        "created_at": int(generation.started_at),
        "model": model,
        **{name: getattr(body, name) for name in ECHOED},
        "background": False,
        "error": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": used["temperature"],
        "text": {"format": {"type": "text"}, **{k: v for k, v in (body.text or {}).items() if v is not None}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": used["top_p"],
        "truncation": "disabled",
    }


STARTED: dict[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
"""What a response says besides, before its first token."""


def ending_of(renderer: ChatRenderer, answered: Answered, output: list[Item]) -> dict[str, Any]:
    """What it says in place of that in the end."""
    turn = answered.turn
    cut = turn.finish == "length"
    return {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else int(turn.finished_at),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": _usage(renderer, answered),
    }


def ids_of(generation: Generation) -> dict[str, list[int]]:
    return {"prompt_token_ids": generation.prompt.prompt_ids.tolist(), "token_ids": generation.ids}


def output_of(answered: Answered, logprobs: Sequence[Any] = ()) -> list[Item]:
    """The items of an answer. One that says nothing is an empty message: its client sends that back."""
    generation, turn, answer = answered
    cut = turn.finish == "length"
    output: list[Item] = []
    if thoughts := (answer.reasoning or "").lstrip():  # as a stream tells them
        done = not cut or answer.content or answer.tool_calls
        output.append(reasoning_item(generation, thoughts, "completed" if done else "incomplete"))
    if answer.content or not answer.tool_calls:
        status = "incomplete" if cut else "completed"
        output.append(message_item(generation, answer.content, status, logprobs))
    return output + [call_item(generation, index, call) for index, call in enumerate(answer.tool_calls)]


def reasoning_item(generation: Generation, text: str | None, status: str) -> Item:
    content = [] if text is None else [reasoning_part(text)]
    return {
        "id": "rs_" + _name(generation),
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def reasoning_part(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def message_item(generation: Generation, text: str | None, status: str, logprobs: Sequence[Any] = ()) -> Item:
    return {
        "id": "msg_" + _name(generation),
        "type": "message",
        "role": "assistant",
        "content": [] if text is None else [text_part(text, logprobs)],
        "status": status,
    }


def text_part(text: str, logprobs: Sequence[Any] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(generation: Generation, index: int, call: ToolCall) -> Item:
    return {
        "id": f"fc_{_name(generation)}_{index}",
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _name(generation: Generation) -> str:
    return generation.completion_id.removeprefix(PREFIX)


def _usage(renderer: ChatRenderer, answered: Answered) -> dict[str, Any]:
    generation, thoughts = answered.generation, answered.answer.reasoning
    prompt, completion = len(generation.prompt.prompt_ids), len(generation.ids)
    thought = len(renderer.tokenizer.encode(thoughts)) if thoughts else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": min(thought, completion)},
        "total_tokens": prompt + completion,
    }
