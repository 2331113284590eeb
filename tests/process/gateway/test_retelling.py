"""A stream keeps no output for a retry: a client that joins is told the answer from its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.support.gateway.calls import RETRY
from tests.support.gateway.gated_engine import GatedEngine, asked, let_on
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import RunningGateway
from tests.support.gateway.streams import text_of

TOKENS = 40_000
BYTES_PER_TOKEN = 200
"""Memory that a token may take: an id and a log-probability, as Python's objects in lists."""
BASE = 2**20
"""Bytes that a call may take apart from its tokens."""
HELD_BACK = 10
"""Tokens whose text the gateway may keep until it knows how the text goes on."""
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"logprobs": 1, "prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS * 2},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture(scope="module")
def process_and_gateway(processes: Processes) -> Iterator[tuple[psutil.Process, RunningGateway]]:
    with processes.gateway(context_length=10**6) as (process, gateway):
        yield psutil.Process(process.pid), gateway


@contextmanager
def streaming(
    gateway: RunningGateway, session: dict[str, Any], path: str, attempt: int
) -> Iterator[Iterator[str]]:
    headers = {"authorization": f"Bearer {session['api_key']}", RETRY: str(attempt)}
    body = {**PATHS[path], "stream": True}
    with httpx.stream("POST", gateway.url + path, json=body, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200
        yield reply.iter_lines()


def gated(processes: Processes, gateway: RunningGateway, stall_after: int) -> None:
    engine = GatedEngine(processes.backends.tokenizer, stall_after=stall_after)
    engine.script.append([300, 301] * (stall_after // 2 + 50))
    gateway.engine = processes.backends.engine = engine


def test_a_long_stream_keeps_its_tokens_and_not_its_output(
    processes: Processes, process_and_gateway: tuple[psutil.Process, RunningGateway]
) -> None:
    process, gateway = process_and_gateway
    path = "/v1/chat/completions"
    gateway.chat("warm")
    session = gateway.session()
    gated(processes, gateway, TOKENS)
    before = process.memory_info().rss
    with streaming(gateway, session, path, 0) as lines:
        heard = 0
        while heard < TOKENS - HELD_BACK:
            heard += text_of([next(lines)])[1]
        assert process.memory_info().rss - before < BASE + TOKENS * BYTES_PER_TOKEN
        let_on(gateway)
        heard += text_of(list(lines))[1]
    assert heard > TOKENS


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_joins_hears_the_same_answer(
    processes: Processes, process_and_gateway: tuple[psutil.Process, RunningGateway], path: str
) -> None:
    _, gateway = process_and_gateway
    session = gateway.session()
    gated(processes, gateway, 300)
    with streaming(gateway, session, path, 0) as first:
        asked(gateway, 1)
        with streaming(gateway, session, path, 1) as again:
            begun = [next(again)]
            let_on(gateway)
            heard_again, heard = begun + list(again), list(first)
    assert text_of(heard) == text_of(heard_again)
    assert text_of(heard)[0]
    assert len(gateway.turns(session)) == 1
