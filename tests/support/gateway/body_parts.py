"""Messages, tools, calls and results of each dialect, of which tests make bodies."""

from typing import Any

HI: Any = {"role": "user", "content": "hi"}
TEXT: Any = {"type": "text", "text": "hi"}
FUNCTION: Any = {"name": "get", "parameters": {"type": "object"}}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
OTHER: Any = {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
GET_IT: Any = {"type": "function", "function": {"name": "get"}}
TOOL: Any = {"type": "function", **FUNCTION}
MY_TOOL: Any = {"name": "get", "input_schema": {"type": "object"}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
ITEM_CALL: Any = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c", "output": "7"}
USE: Any = {"type": "tool_use", "id": "c", "name": "get", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
