"""The messages that a recorded turn's tokens mean, with the names of chat completions."""

from collections.abc import Sequence

from gateway.language.parsed_answer import ParsedAnswer
from gateway.language.render import ChatRenderer
from gateway.operators.prompt_reader import PromptMessage, PromptReader
from gateway.rest.turns.shapes import ConversationMessage, MessageShape, ToolCallShape
from rollout_queue.contract.records import Turn

MOST_MESSAGES = 200
"""A turn shows so many messages of its context at most, the newest."""


def message_of(turn: Turn, renderer: ChatRenderer) -> MessageShape:
    """What the turn's tokens say."""
    answer = _answer(turn, renderer)
    return {
        "role": "assistant",
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "tool_calls": _calls(answer),
    }


def conversation_of(turn: Turn, renderer: ChatRenderer, limit: int) -> tuple[list[ConversationMessage], int]:
    """The messages that the turn adds to its parent's, its answer last, and how many older ones are left out.
    Each text has at most `limit` characters."""
    ids = turn.context_ids.tolist()
    found = PromptReader(renderer.tokenizer).read(ids)
    shown = [_of_prompt(each, turn, ids, renderer, limit) for each in found[-MOST_MESSAGES:]]
    # The prompt's end, which asks for the answer, is a message without content.
    said = [each for each in shown if each["content"] or each["tool_calls"] or each["reasoning_content"]]
    answer = _shape("assistant", _answer(turn, renderer), limit)
    return [*said, answer], max(0, len(found) - MOST_MESSAGES)


def _answer(turn: Turn, renderer: ChatRenderer) -> ParsedAnswer:
    """Its tools are not recorded, so every call of a tool counts as one."""
    return renderer.parse(turn.output_ids.tolist(), None, turn.turn_id, prompt_ids=turn.context_ids)


def _of_prompt(
    message: PromptMessage, turn: Turn, ids: Sequence[int], renderer: ChatRenderer, limit: int
) -> ConversationMessage:
    part = range(message.start, message.end)
    if message.role == "assistant":
        answer = renderer.parse(ids[message.start : message.end], None, f"{turn.turn_id}_{message.start}")
    else:
        answer = ParsedAnswer(message.text)
    images = [place for place, each in enumerate(turn.images) if each.start in part]
    return {**_shape(message.role, answer, limit), "images": images}


def _shape(role: str, answer: ParsedAnswer, limit: int) -> ConversationMessage:
    """The message, with each of its texts cut to the limit."""
    calls = _calls(answer)
    texts = [answer.content, answer.reasoning or "", *(call["function"]["arguments"] for call in calls)]
    for call in calls:
        call["function"]["arguments"] = call["function"]["arguments"][:limit]
    return {
        "role": role,  # type: ignore[typeddict-item]  # one of the roles of `PromptReader`
        "content": answer.content[:limit],
        "reasoning_content": answer.reasoning and answer.reasoning[:limit],
        "tool_calls": calls,
        "images": [],
        "left_out": sum(max(0, len(text) - limit) for text in texts),
    }


def _calls(answer: ParsedAnswer) -> list[ToolCallShape]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
