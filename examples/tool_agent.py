"""Plays groups of eight sessions of one task, each with a tool loop and a reward, until a step was made."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

GATEWAY = "http://127.0.0.1:8000"
KEYS = Path("run/keys/client_keys")
"""`make up` writes them."""
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


def play_group(gateway: httpx.Client) -> list[float]:
    """The rewards of eight attempts at the task, made at once."""
    opened = gateway.post("/groups", json={"size": 8, "task_id": "value-of-c"}).raise_for_status().json()

    def play(session: dict[str, Any]) -> float:
        answer = solve(OpenAI(base_url=session["base_url"], api_key=session["api_key"]), "value of c?")
        reward = 1.0 if answer == WORLD["c"] else 0.0
        ending = {"status": "completed", "reward": reward}
        gateway.post(f"/sessions/{session['session_id']}/finish", json=ending).raise_for_status()
        return reward

    with ThreadPoolExecutor() as pool:
        return list(pool.map(play, opened["sessions"]))


def version_of(gateway: httpx.Client) -> int | None:
    """The version that answers calls now."""
    version: int | None = gateway.get("/v1/models").raise_for_status().json()["data"][0]["version"]
    return version


def main() -> None:
    gateway = httpx.Client(base_url=GATEWAY, headers={"x-api-key": KEYS.read_text().split()[0]}, timeout=60)
    before, different = version_of(gateway), 0
    for number in range(1, MOST_GROUPS + 1):
        rewards = play_group(gateway)
        different += len(set(rewards)) > 1
        use = "" if len(set(rewards)) > 1 else ": all alike, so nothing is learned from it"
        print(f"group {number}: rewards {rewards}{use}", flush=True)
        if (now := version_of(gateway)) != before:
            print(f"version {now} has learned from such groups, and answers calls now")
            return
    print(
        f"no new version yet: {different} of {MOST_GROUPS} groups had different rewards; play more of them, "
        "`weir top` says what the next step waits for"
    )


if __name__ == "__main__":
    main()
