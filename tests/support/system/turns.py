"""Reads from a running system: turns, versions of tokens, probabilities, continued generations, processes."""

from typing import Any

import httpx
import psutil
from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.records import Turn
from rollout_queue.redis import key_names
from tests.support.system.real_system import System


def versions_of(turn: dict[str, Any]) -> list[int]:
    """The version of each output token. Checks that the spans cover the output without gap or overlap."""
    versions: list[int] = []
    for span in turn["versions"]:
        assert span["start"] == len(versions)
        versions += [span["version"]] * (span["end"] - span["start"])
    assert len(versions) == len(turn["output_ids"]) == len(turn["logprobs"])
    return versions


def retried(system: System) -> float:
    """How many generations continued on an engine after a fault."""
    text = system.request("GET", "/metrics", key="").text
    lines = [line for line in text.splitlines() if line.startswith("weir_engine_faults_total{")]
    return sum(float(line.split()[-1]) for line in lines if 'outcome="retried"' in line)


def scored(engine_url: str, turn: dict[str, Any]) -> list[float]:
    """The log-probabilities that the engine gives the turn's tokens now."""
    body = {
        "input_ids": turn["context_ids"] + turn["output_ids"],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = httpx.post(f"{engine_url}/generate", json=body, timeout=300).json()
    found = [triple[0] for triple in reply["meta_info"]["input_token_logprobs"]]
    return found[len(turn["context_ids"]) :]


def recorded_turns(redis: Redis, session_id: str) -> list[Turn]:
    """The turns as Redis has them, the oldest first."""
    fields: Any = redis.hgetall(key_names.session(session_id))
    records = [decode(value) for name, value in fields.items() if name.startswith(b"t:")]
    return sorted((each for each in records if isinstance(each, Turn)), key=lambda turn: turn.started_at)


def engine_processes(system: System) -> list[psutil.Process]:
    port = str(system.settings.engine_port)
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "sglang.launch_server" in (command := process.info["cmdline"] or []) and port in command
    ]
