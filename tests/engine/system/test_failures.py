"""What the system guarantees when weights are broken, an engine is killed, or Redis is gone."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.system.real_system import ADMIN_KEY, System
from tests.support.waiting import wait_until


def engine_processes(system: System) -> list[psutil.Process]:
    port = str(system.settings.engine_port)
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "sglang.launch_server" in (command := process.info["cmdline"] or []) and port in command
    ]


def published(system: System, tmp_path: Path) -> Path:
    """The directory of a copy of the newest policy, for a test to damage."""
    policies = sorted((system.settings.run_dir / "policies").glob("v*"))
    copy: Path = system.settings.run_dir / "policies" / tmp_path.name
    shutil.copytree(policies[-1], copy)
    return copy


def push(system: System, version: int, location: Path) -> httpx.Response:
    body = {"version": version, "location": location.as_uri(), "force": True}
    reply: httpx.Response = system.request("POST", "/admin/policies", body, key=ADMIN_KEY)
    return reply


@pytest.mark.parametrize("damage", ["truncated", pytest.param("wrong shape", marks=pytest.mark.long)])
def test_broken_weights_never_reach_the_engine(system: System, tmp_path: Path, damage: str) -> None:
    serving, engine = system.trained(), engine_processes(system)
    location = published(system, tmp_path)
    manifest = json.loads((location / "manifest.json").read_text())
    weights = location / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        content = weights.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        name = next(n for n, spec in header.items() if n != "__metadata__" and len(spec["shape"]) == 2)
        header[name]["shape"] = header[name]["shape"][::-1]
        packed = json.dumps(header).encode().ljust(size)
        weights.write_bytes(content[:8] + packed + content[8 + size :])
    manifest["version"] = serving + 1000
    (location / "manifest.json").write_text(json.dumps(manifest))
    reply = push(system, serving + 1000, location)
    assert reply.status_code == 207
    (result,) = reply.json()["results"]
    assert not result["ok"]
    assert "model.safetensors" in result["error"]
    assert system.serving() == serving
    assert engine_processes(system) == engine
    system.say(system.post("/sessions", {}), "still here")


@pytest.mark.long
def test_a_killed_engine_comes_back_with_the_current_policy(system: System) -> None:
    version, restarts = system.trained(), system.rollout()["restarts"]
    for process in engine_processes(system):
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: system.rollout()["restarts"] > restarts, 60)
    wait_until(lambda: system.rollout()["state"] == "ready", 180)
    assert system.rollout()["version"] == version
    assert system.get("/model_info", url=system.engine_url)["weight_version"] == str(version)
    wait_until(lambda: system.request("GET", "/ready").status_code == 200)
    ticket = system.post("/sessions", {})
    system.say(ticket, "and on")
    (turn,) = system.get(f"/sessions/{ticket['session_id']}")["turns"]
    assert turn["versions"][0]["version"] == version


@pytest.mark.long
def test_without_redis_no_call_succeeds(system: System) -> None:
    ticket = system.post("/sessions", {})
    redis = system.redis.process.pid
    os.kill(redis, signal.SIGSTOP)
    try:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        reply = system.request("POST", f"/sessions/{ticket['session_id']}/v1/chat/completions", body)
    finally:
        os.kill(redis, signal.SIGCONT)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")
    assert reply.headers["retry-after"]
    system.say(ticket, "back again")
    assert len(system.get(f"/sessions/{ticket['session_id']}")["turns"]) == 1
