"""An example with every kind of message: rendering it shows which control tokens a template uses."""

from gateway.language.chat_messages import Message, Tool

EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
EXAMPLE_MESSAGES: list[Message] = [
    {"role": "system", "content": "help"},
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": "well",
        "reasoning_content": "so",
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
            for n in range(2)
        ],
    },
    {"role": "tool", "tool_call_id": "c0", "content": "seen"},
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
]
