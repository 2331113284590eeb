"""The demo's game: the user asks for a value that only the tool knows.

user       value of c?
assistant  get(key="c")          ── the warm-started model mostly says "unknown" instead
tool       c = 7
assistant  7                     ── reward 1

The agent is a plain tool loop on the official OpenAI client, which needs a base URL and a key.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

from rollout_queue import clock

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


MAX_CALLS = 2
MAX_TOKENS = 40


async def solve(client: AsyncOpenAI, task: ToolTask, takes_s: Sequence[float] = (0.0,) * MAX_CALLS) -> str:
    """Ask the question, run the tools that the model calls, and return the model's answer; empty without one.

    `takes_s` has one item for each call to the model: how many seconds the tools in its answer take.
    """
    messages: list[Any] = [{"role": "user", "content": task.question}]
    for seconds in takes_s:
        completion = await client.chat.completions.create(
            model="gpt-4o-mini", messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        await clock.sleep(seconds)
        for call in message.tool_calls:
            if call.type == "function":
                result = task.tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


GameTask = TypeVar("GameTask")


class Game(Protocol[GameTask]):
    """One kind of episode. The tasks of a game depend only on `random`."""

    def group(self, random: Random, size: int) -> Sequence[GameTask]:
        """The tasks of one group, one for each member; all have the same question."""

    def task_id(self, task: GameTask) -> str:
        """The id of the question in recorded data."""

    async def play(self, client: AsyncOpenAI, task: GameTask) -> float:
        """Play one episode and return its reward. Raises OpenAIError when a call failed."""


class ToolGame:
    """The demo's game: a question about a value that only the tool knows."""

    def group(self, random: Random, size: int) -> Sequence[ToolTask]:
        return [draw(random)] * size

    def task_id(self, task: ToolTask) -> str:
        return f"value-of-{task.key}"

    async def play(self, client: AsyncOpenAI, task: ToolTask) -> float:
        return task.reward(await solve(client, task))
