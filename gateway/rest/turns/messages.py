"""The message that a recorded turn's tokens mean, with the names of chat completions."""

from gateway.language.render import ChatRenderer
from gateway.rest.turns.shapes import MessageShape, ToolCallShape
from rollout_queue.contract.records import Turn


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
