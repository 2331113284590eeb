"""The message that a recorded turn's tokens mean, with the names of chat completions."""

from typing import Literal

from typing_extensions import TypedDict

from gateway.language.render import ChatRenderer
from rollout_queue.contract.records import Turn


class FunctionShape(TypedDict):
    name: str
    arguments: str
    """As the model wrote them; they may not be JSON."""


class ToolCallShape(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionShape


class ImageShape(TypedDict):
    """An image that a turn's prompt shows, and its place among the turn's `context_ids`."""

    sha256: str
    start: int
    end: int
    width: int
    height: int
    grid: list[int]


class MessageShape(TypedDict):
    """An answer, with the names of chat completions."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str | None
    tool_calls: list[ToolCallShape]


def message_of(turn: Turn, renderer: ChatRenderer) -> MessageShape:
    """What the turn's tokens say. Its tools are not recorded, so every call of a tool counts as one."""
    answer = renderer.parse(turn.output_ids.tolist(), None, turn.turn_id, prompt_ids=turn.context_ids)
    calls: list[ToolCallShape] = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.tool_calls
    ]
    return {
        "role": "assistant",
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "tool_calls": calls,
    }
