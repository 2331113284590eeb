"""Log-probabilities of long answers: they are many, and other calls do not wait for them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.gateway.processes import Processes
from tests.support.gateway.running import CLIENT_KEY, RunningGateway

TOKENS = 16000
TOPS = 20
"""The most alternatives that OpenAI's contract allows."""
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": TOPS,
        "max_tokens": TOKENS,
    },
    "/v1/completions": {"prompt": "hi", "logprobs": TOPS, "max_tokens": TOKENS},
    "/v1/responses": {"input": "hi", "top_logprobs": TOPS, "max_output_tokens": TOKENS},
}


@pytest.fixture(scope="module")
def process_and_gateway(processes: Processes) -> Iterator[tuple[psutil.Process, RunningGateway]]:
    with processes.gateway(context_length=2 * TOKENS) as (process, gateway):
        yield psutil.Process(process.pid), gateway


def told(path: str, body: dict[str, Any]) -> list[Any]:
    """The log-probabilities of a reply, one entry for each token."""
    if path == "/v1/responses":
        return list(body["output"][0]["content"][0]["logprobs"])
    logprobs = body["choices"][0]["logprobs"]
    return list(logprobs["content"] if "content" in logprobs else logprobs["top_logprobs"])


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def longest_wait(process: psutil.Process, gateway: RunningGateway, done: Callable[[], bool]) -> float:
    """The CPU seconds that the gateway spends during the longest of the calls that are made until `done`."""
    longest = 0.0
    while not done():
        begun = cpu_s(process)
        assert gateway.get("/live").status_code == 200
        longest = max(longest, cpu_s(process) - begun)
    return longest


def longest_share(
    processes: Processes, process: psutil.Process, gateway: RunningGateway, path: str, stream: bool
) -> float:
    """The share of a call's CPU time for which another call waited at most."""
    processes.backends.engine.script.append([300, 301] * (TOKENS // 2))
    begun = cpu_s(process)
    body, key = ASKED[path] | {"stream": stream}, {"authorization": f"Bearer {CLIENT_KEY}"}
    with ThreadPoolExecutor() as pool:
        reply = pool.submit(httpx.post, gateway.url + path, json=body, headers=key, timeout=120)
        longest = longest_wait(process, gateway, reply.done)
    assert reply.result().status_code == 200
    if not stream:
        assert len(told(path, reply.result().json())) == TOKENS
    return longest / (cpu_s(process) - begun)


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in ASKED), ("/v1/responses", True)])
def test_other_calls_do_not_wait_for_many_logprobs(
    processes: Processes, process_and_gateway: tuple[psutil.Process, RunningGateway], path: str, stream: bool
) -> None:
    process, gateway = process_and_gateway
    gateway.engine = processes.backends.engine
    # On a busy machine, the test may be late to read a reply, and the call then seems long. That is chance. A
    # call that really waits does so in each of the three attempts.
    assert any(longest_share(processes, process, gateway, path, stream) < 1 / 3 for _ in range(3))
