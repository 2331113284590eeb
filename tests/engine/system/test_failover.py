"""Agents notice nothing when weights change in their calls, are broken, or when an engine is killed."""

import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.system.real_system import ADMIN_KEY, System
from tests.support.system.turns import engine_processes, retried, scored, versions_of
from tests.support.tolerances import ulps

STREAMS = 8


def stream(system: System, ticket: dict[str, Any], max_tokens: int) -> Iterator[str]:
    """The text of one streamed call of an agent, chunk by chunk. Raises what the client raises."""
    messages: list[Any] = [{"role": "user", "content": "tell me everything"}]
    with system.client(ticket) as client:
        chunks = client.chat.completions.create(
            model="policy", messages=messages, max_tokens=max_tokens, stream=True
        )
        finish = None
        for chunk in chunks:
            yield chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        assert finish in ("stop", "length")


def turns_of(system: System, ticket: dict[str, Any]) -> list[Any]:
    found: list[Any] = system.get(f"/sessions/{ticket['session_id']}?tokens=true")["turns"]
    return found


def push(system: System, version: int) -> None:
    reply = system.request("POST", f"/admin/policies/{version}/promote", {}, key=ADMIN_KEY)
    assert reply.status_code == 200, reply.text


def test_no_stream_fails_while_weights_change_and_each_token_knows_its_version(system: System) -> None:
    newest = system.trained()
    over = threading.Event()

    def agent(_: int) -> list[list[int]]:
        ticket = system.post("/sessions", {"train": False})
        calls = 0
        while not over.is_set() or not calls:
            assert sum(1 for _ in stream(system, ticket, max_tokens=48)) > 0
            calls += 1
        turns = turns_of(system, ticket)
        assert len(turns) == calls
        return [versions_of(turn) for turn in turns]

    with ThreadPoolExecutor(STREAMS) as pool:
        agents = [pool.submit(agent, n) for n in range(STREAMS)]
        try:
            for version in (0, newest, 0, newest):
                push(system, version)
        finally:
            over.set()
        answers = [versions for agent in agents for versions in agent.result()]
    assert {version for versions in answers for version in versions} == {0, newest}
    assert any(len(set(versions)) > 1 for versions in answers), "no answer was under way during a push"


def test_streams_go_on_where_a_killed_engine_left_them(system: System) -> None:
    streams, begun, faults = 8, threading.Semaphore(0), retried(system)
    version, restarts = system.trained(), system.rollout()["restarts"]
    engine = engine_processes(system)
    tickets = [system.post("/sessions", {"train": False}) for _ in range(streams)]

    def agent(ticket: dict[str, Any]) -> tuple[dict[str, Any], str]:
        heard, signed = "", False
        client = system.client(ticket)
        for chunk in client.completions.create(model="policy", prompt="on", max_tokens=400, stream=True):
            heard += chunk.choices[0].text if chunk.choices else ""
            if len(heard) > 20 and not signed:
                signed = True
                begun.release()
        return ticket, heard

    with ThreadPoolExecutor(streams) as pool:
        agents = [pool.submit(agent, ticket) for ticket in tickets]
        for _ in range(streams // 2):  # these have just begun, and the others have not, or just so
            assert begun.acquire(timeout=300)
        for process in engine:
            process.send_signal(signal.SIGKILL)
        results = [agent.result() for agent in agents]
    assert retried(system) >= faults + 4
    for ticket, heard in results:
        (turn,) = turns_of(system, ticket)
        assert len(set(versions_of(turn))) == 1
        text = system.get(f"/sessions/{ticket['session_id']}?text=true")["turns"][0]["output_text"]
        assert text in (heard, f"{heard}<|im_end|>", f"{heard}<|endoftext|>")
        # The restarted engine gives each token the same probability.
        differences = [
            abs(a - b) for a, b in zip(scored(system.engine_url, turn), turn["logprobs"], strict=True)
        ]
        assert max(differences) <= ulps(1024, of=math.log(1024))  # float32 sums over the vocabulary
    rollout = system.rollout()
    assert (rollout["restarts"] > restarts, rollout["state"], rollout["version"]) == (True, "ready", version)
    assert system.get("/model_info", url=system.engine_url)["weight_version"] == str(version)


def test_broken_weights_never_reach_the_engine(system: System, tmp_path: Path) -> None:
    """Other damages are in `tests/engine/rollout_server/test_real_engine.py`."""
    version, engine = system.trained(), engine_processes(system)
    policies = system.settings.run_dir / "policies"
    broken: Path = policies / tmp_path.name
    shutil.copytree(sorted(policies.glob("v*"))[-1], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    manifest = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps(manifest | {"version": version + 1000}))
    body = {"version": version + 1000, "location": broken.as_uri(), "force": True}
    reply = system.request("POST", "/admin/policies", body, key=ADMIN_KEY)
    assert reply.status_code == 207
    (result,) = reply.json()["results"]
    assert not result["ok"]
    assert "model.safetensors" in result["error"]
    assert system.serving() == version
    assert engine_processes(system) == engine
    system.say(system.post("/sessions", {}), "still here")
