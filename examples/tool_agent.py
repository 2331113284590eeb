"""Plays groups of eight sessions of one task, each with a tool loop and a reward, until a step was made."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

import weir

MOST_GROUPS = 24
"""A step needs several groups whose rewards differ."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
WORLD = {"c": "7"}


def solve(client: OpenAI, question: str) -> str:
    """Ask, run the tool if the model calls it, and return the answer; empty if two calls bring none."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            if call.type == "function":
                key = json.loads(call.function.arguments).get("key")
                result = f"{key} = {WORLD.get(key, 'nothing')}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def play(s: weir.AgentSession) -> float:
    return s.reward(float(solve(s.openai(), "value of c?") == WORLD["c"]))


def version_of(s: weir.AgentSession) -> Any:
    """The version that answers calls now."""
    return s.openai().models.list().data[0].to_dict()["version"]


def main() -> None:
    before, different = None, 0
    for number in range(1, MOST_GROUPS + 1):
        with weir.group("value-of-c", n=8) as members, ThreadPoolExecutor() as pool:
            before = version_of(members[0]) if before is None else before
            rewards = list(pool.map(play, members))
            now = version_of(members[0])
        different += len(set(rewards)) > 1
        use = "" if len(set(rewards)) > 1 else ": all alike, so nothing is learned from it"
        print(f"group {number}: rewards {rewards}{use}", flush=True)
        if now != before:
            print(f"version {now} has learned from such groups, and answers calls now")
            return
    print(
        f"no new version yet: {different} of {MOST_GROUPS} groups had different rewards; play more of them, "
        "`weir top` says what the next step waits for"
    )


if __name__ == "__main__":
    main()
