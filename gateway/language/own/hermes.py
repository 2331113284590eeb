"""Writes tools into the text of a conversation, and reads calls from the text of an answer, in Hermes' form.

It is for models whose template writes no tools, and whose tokenizer has no token for the tags.
"""

import json
import re
from collections.abc import Sequence

from renderers import ToolCallParseStatus
from renderers.base import ParsedToolCall

from gateway.language.chat_messages import Message, Tool
from gateway.language.parsed_answer import within_levels

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"{OPEN}{CLOSE} XML tags:\n"
    f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
)
"""The words are those of Qwen's and Hermes' templates, which many models have seen."""
BLOCK = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|\\Z)", re.DOTALL)


def with_tool_prompt(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
    """The messages without tools: the system prompt describes them, and calls and results are text."""
    written: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("results"):
                result = f"{written.pop()['content']}\n{result}"
            written.append({"role": "user", "content": result, "results": True})
        else:
            written.append(_with_calls(message))
    for message in written:
        message.pop("results", None)
    if not tools:
        return written
    prompt = "\n".join((HEAD, *(json.dumps(tool, ensure_ascii=False) for tool in tools))) + TAIL
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{prompt}"}, *written[1:]]
    return [{"role": "system", "content": prompt}, *written]


def _with_calls(message: Message) -> Message:
    """The message with its calls as text."""
    texts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        name, arguments = (
            json.dumps(call["function"]["name"], ensure_ascii=False),
            call["function"]["arguments"],
        )
        texts.append(f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}')
    kept = {field: value for field, value in message.items() if field != "tool_calls"}
    return kept if "tool_calls" not in message else kept | {"content": "\n".join(texts)}


def calls_in(text: str) -> tuple[str, list[ParsedToolCall]]:
    """The text of an answer without its calls, and the calls. A block that is no call stays in the text."""
    calls: list[ParsedToolCall] = []

    def taken(block: re.Match[str]) -> str:
        if not block[0].endswith(CLOSE):
            status = ToolCallParseStatus.UNCLOSED_BLOCK
            calls.append(ParsedToolCall(raw=block[0], name=None, arguments={}, status=status))
            return ""
        try:
            call = json.loads(block[1])
        except (ValueError, RecursionError):
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", {}) if isinstance(call, dict) else {}
        if not name or not isinstance(name, str) or not within_levels(arguments):
            return block[0]
        calls.append(
            ParsedToolCall(
                raw=block[1].strip(), name=name, arguments=arguments, status=ToolCallParseStatus.OK
            )
        )
        return ""

    return BLOCK.sub(taken, text), calls
