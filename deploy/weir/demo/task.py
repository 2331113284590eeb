"""The demo's task: the user asks for a value that only the tool knows.

user       value of c?
assistant  get(key="c")          ── the warm-started model mostly says "unknown" instead
tool       c = 7
assistant  7                     ── reward 1
"""

import json
from dataclasses import dataclass
from random import Random

from openai.types.chat import ChatCompletionFunctionToolParam

KEYS = "abcdefghij"
VALUES = "0123456789"
UNKNOWN = "unknown"

TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class ToolTask:
    """One question, the tool that knows the answer, and the reward."""

    key: str
    value: str

    @property
    def question(self) -> str:
        return f"value of {self.key}?"

    def tool(self, name: str, arguments: str) -> str:
        """The tool's answer to any call. For another key than `self.key`, it has another value."""
        try:
            key = json.loads(arguments)["key"]
        except (ValueError, TypeError, KeyError):
            return "error: give a key"
        if name != "get" or not isinstance(key, str):
            return "error: no such tool"
        if key == self.key:
            return f"{key} = {self.value}"
        return f"{key} = {(int(self.value) + 1) % 10}"

    def reward(self, answer: str) -> float:
        return 1.0 if answer.strip() == self.value else 0.0


def draw(random: Random) -> ToolTask:
    return ToolTask(random.choice(KEYS), random.choice(VALUES))


def call_text(key: str) -> str:
    """A tool call as the model's chat template writes it."""
    call = json.dumps({"name": "get", "arguments": {"key": key}})
    return f"<tool_call>\n{call}\n</tool_call>"
