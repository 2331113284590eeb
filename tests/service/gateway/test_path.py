"""The path of a plain chat turn is short: files, functions and calls of the product that it meets."""

import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.house import Trace
from gateway import periodic_tasks
from gateway.app import create_app
from tests.support.gateway.running import CLIENT_KEY, Backends
from tests.support.serving import serving
from tests.support.waiting import wait_until

BUDGETS = Path(__file__).parents[2] / "house" / "budgets.yaml"
SESSIONS = 10


def test_a_plain_chat_turn_of_a_warm_session_stays_in_its_budget(
    own_backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of a session. The periodic tasks rest, so that a slow machine does not count their calls."""
    for name in ("LAG_EVERY_S", "WATCH_EVERY_S"):
        monkeypatch.setattr(periodic_tasks, name, 3600.0)
    budget = yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))["turn"]
    own_backends.clear(None)
    app, trace = create_app(own_backends.settings(poll_every_s=3600.0)), Trace()

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        sys.setprofile(trace)
        await app(scope, receive, send)

    threading.setprofile(trace)
    try:
        with serving(traced) as url, httpx.Client(base_url=url, timeout=120) as http:
            wait_until(lambda: http.get("/ready").status_code == 200)
            http.headers.update({"authorization": f"Bearer {CLIENT_KEY}"})
            turns = [traced_turn(http, trace, f"session-{number}") for number in range(SESSIONS)]
    finally:
        threading.setprofile(None)
    least = min(turns, key=lambda turn: turn.calls.total())
    files = least.files()
    for path, calls in files.most_common():
        print(f"{calls:5} {path}")
    found = {"files": len(files), "functions": len(least.calls), "calls": least.calls.total()}
    print(found)
    assert all(found[name] <= budget[name] for name in budget), found


def traced_turn(http: httpx.Client, trace: Trace, session: str) -> Trace:
    messages = list[dict[str, Any]]()
    for number in range(3):
        messages.append({"role": "user", "content": f"question {number}"})
        trace.clear()
        trace.on = number == 2
        reply = http.post(
            "/v1/chat/completions", json={"messages": messages}, headers={"x-session-id": session}
        )
        trace.on = False
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])
    return Trace(trace.calls.copy())
