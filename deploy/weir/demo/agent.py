"""The demo's agent: a plain tool loop on the official OpenAI client, which needs a base URL and a key."""

from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI

from rollout_queue import clock
from weir.demo.task import TOOL, ToolTask

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
