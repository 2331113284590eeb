"""Samples one task eight times: a group of sessions, each with a tool loop and a reward."""

import json
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

GATEWAY = "http://127.0.0.1:8000"
KEYS = Path("run/keys/client_keys")
"""`make up` writes them."""
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


def main() -> None:
    gateway = httpx.Client(base_url=GATEWAY, headers={"x-api-key": KEYS.read_text().split()[0]})
    group = gateway.post("/groups", json={"size": 8, "task_id": "value-of-c"}).json()
    for session in group["sessions"]:
        answer = solve(OpenAI(base_url=session["base_url"], api_key=session["api_key"]), "value of c?")
        reward = 1.0 if answer == WORLD["c"] else 0.0
        ending = {"status": "completed", "reward": reward}
        gateway.post(f"/sessions/{session['session_id']}/finish", json=ending).raise_for_status()
        print(f"{session['session_id']}: {answer!r} → {reward}")


if __name__ == "__main__":
    main()
