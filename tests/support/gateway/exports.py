"""Makes episodes and exports them as rows."""

import json
from typing import Any

from tests.support.gateway.running import ADMIN_KEY, RunningGateway


def export(gateway: RunningGateway, **asked: Any) -> list[dict[str, Any]]:
    reply = gateway.get("/admin/export", key=ADMIN_KEY, params=asked)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/jsonl"
    return [json.loads(line) for line in reply.text.splitlines()]


def episode(gateway: RunningGateway, turns: int = 2, **body: Any) -> dict[str, Any]:
    session = gateway.session(**body)
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"question {number}"})
        reply = gateway.post(f"/sessions/{session['session_id']}/v1/chat/completions", {"messages": messages})
        messages.append(reply.json()["choices"][0]["message"])
    return session
