"""What calls cost a gateway in memory and time: prompts that are too long, long streams, many logprobs."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.gated_engine import GatedEngine, let_on
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import CLIENT_KEY, RunningGateway
from tests.support.gateway.streams import text_of

Started = tuple[psutil.Process, RunningGateway]


@pytest.fixture(scope="module")
def started(processes: Processes) -> Iterator[Started]:
    """A gateway that all tests share."""
    with processes.gateway(context_length=200_000) as (process, gateway):
        yield psutil.Process(process.pid), gateway


def cpu_s(process: psutil.Process) -> float:
    """The CPU time that a process has used, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


# A prompt that is too long

BODY_CHARS = 31 * 10**6
REFUSALS = 4
TEXTS = {
    "prose": "the quick brown fox jumps over 12 lazy dogs, and it goes on\n",
    "one word": "x",
    "control tokens": "<|im_end|>",
    "spaces": " ",
}


def refused(gateway: RunningGateway, body: bytes) -> bool:
    json_type = {"content-type": "application/json"}
    reply = gateway.call("POST", "/v1/chat/completions", content=body, headers=json_type)
    code = reply.json()["error"]["code"]
    return reply.status_code == 400 and code in ("context_length_exceeded", "too_many_values")


@pytest.mark.parametrize(
    "kind", ["prose", *(pytest.param(kind, marks=pytest.mark.long) for kind in TEXTS if kind != "prose")]
)
def test_a_text_that_is_too_long_leaves_memory_and_others_alone(
    started: Started, tokenizer: Tokenizer, kind: str
) -> None:
    """Nobody waits for it, because it costs less than half of what its tokens would."""
    process, gateway = started
    text = (TEXTS[kind] * (BODY_CHARS // len(TEXTS[kind])))[:BODY_CHARS]
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 5}).encode()
    gateway.http.timeout = httpx.Timeout(60)
    assert refused(gateway, body)
    before, began_s = process.memory_info().rss, cpu_s(process)
    for _ in range(REFUSALS):
        assert refused(gateway, body)
    call_s = (cpu_s(process) - began_s) / REFUSALS
    # Who kept the calls would keep the text of each; who does not keeps a few copies of the last one at most.
    assert process.memory_info().rss < before + REFUSALS * BODY_CHARS // 2
    began_s = time.process_time()
    tokenizer.encode(text[: BODY_CHARS // 20])
    assert call_s < 10 * (time.process_time() - began_s)
    assert gateway.turns(gateway.session()) == []


# A long stream

STREAMED = 40_000
BYTES_PER_TOKEN = 200
"""Memory that a token may take: an id and a log-probability, as Python's objects in lists."""
BASE = 2**20
"""Bytes that a call may take apart from its tokens."""
HELD_BACK = 10
"""Tokens whose text the gateway may keep until it knows how the text goes on."""


def test_a_long_stream_keeps_its_tokens_and_not_its_output(processes: Processes, started: Started) -> None:
    process, gateway = started
    processes.backends.engine = FakeEngine(processes.backends.tokenizer)
    gateway.chat("warm")
    session = gateway.session()
    engine = GatedEngine(processes.backends.tokenizer, stall_after=STREAMED)
    engine.script.append([300, 301] * (STREAMED // 2 + 50))
    gateway.engine = processes.backends.engine = engine
    before = process.memory_info().rss
    body = {"logprobs": True, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"authorization": f"Bearer {session['api_key']}"}
    url = gateway.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200
        lines, heard = reply.iter_lines(), 0
        while heard < STREAMED - HELD_BACK:
            heard += text_of([next(lines)])[1]
        assert process.memory_info().rss - before < BASE + STREAMED * BYTES_PER_TOKEN
        let_on(gateway)
        heard += text_of(list(lines))[1]
    assert heard > STREAMED


# Many log-probabilities

TOKENS = 4_000
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


def told(path: str, body: dict[str, Any]) -> list[Any]:
    """The log-probabilities of a reply, one entry for each token."""
    if path == "/v1/responses":
        return list(body["output"][0]["content"][0]["logprobs"])
    logprobs = body["choices"][0]["logprobs"]
    return list(logprobs["content"] if "content" in logprobs else logprobs["top_logprobs"])


def longest_wait(process: psutil.Process, gateway: RunningGateway, done: Callable[[], bool]) -> float:
    """The CPU seconds that the gateway spends during the longest of the calls that are made until `done`."""
    longest = 0.0
    while not done():
        begun = cpu_s(process)
        assert gateway.get("/live").status_code == 200
        longest = max(longest, cpu_s(process) - begun)
    return longest


def longest_share(processes: Processes, started: Started, path: str, stream: bool) -> float:
    """The share of a call's CPU time for which another call waited at most."""
    process, gateway = started
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


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/chat/completions", False),
        pytest.param("/v1/completions", False, marks=pytest.mark.long),
        pytest.param("/v1/responses", False, marks=pytest.mark.long),
        pytest.param("/v1/responses", True, marks=pytest.mark.long),
    ],
)
def test_other_calls_do_not_wait_for_many_logprobs(
    processes: Processes, started: Started, path: str, stream: bool
) -> None:
    processes.backends.engine = FakeEngine(processes.backends.tokenizer)
    # On a busy machine, the test may be late to read a reply, and the call then seems long. That is chance. A
    # call that really waits does so in each of the three attempts.
    assert any(longest_share(processes, started, path, stream) < 1 / 3 for _ in range(3))
