"""Agents notice nothing when weights change in the middle of their calls, or when an engine is killed."""

import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from tests.support.system.real_system import ADMIN_KEY, System
from tests.support.system.turns import retried, versions_of
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
        differences = [abs(a - b) for a, b in zip(scored(system, turn), turn["logprobs"], strict=True)]
        assert max(differences) <= ulps(1024, of=math.log(1024))  # float32 sums over the vocabulary


def scored(system: System, turn: dict[str, Any]) -> list[float]:
    body = {
        "input_ids": turn["context_ids"] + turn["output_ids"],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = httpx.post(f"{system.engine_url}/generate", json=body, timeout=300).json()
    found = [triple[0] for triple in reply["meta_info"]["input_token_logprobs"]]
    return found[len(turn["context_ids"]) :]


def engine_processes(system: System) -> list[psutil.Process]:
    port = str(system.settings.engine_port)
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "sglang.launch_server" in (command := process.info["cmdline"] or []) and port in command
    ]
