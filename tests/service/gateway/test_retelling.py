"""A stream keeps no output for a retry: a client that joins is told the answer from its tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.support.gateway.calls import RETRY
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.gateway.streams import text_of

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"logprobs": True, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"logprobs": 1, "prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000},
    "/v1/responses": {"input": "hi", "instructions": "a\u2028b", "metadata": {"a": "\x85"}},
}


@contextmanager
def streaming(
    gateway: RunningGateway, session: dict[str, Any], path: str, attempt: int
) -> Iterator[Iterator[str]]:
    headers = {"authorization": f"Bearer {session['api_key']}", RETRY: str(attempt)}
    body = {**PATHS[path], "stream": True}
    with httpx.stream("POST", gateway.url + path, json=body, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200
        yield reply.iter_lines()


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_joins_hears_the_same_answer(gated: RunningGateway, path: str) -> None:
    session = gated.session()
    gated.engine.stall_after = 300
    gated.engine.script.appendleft([300, 301] * 200)
    with streaming(gated, session, path, 0) as first:
        asked(gated, 1)
        with streaming(gated, session, path, 1) as again:
            begun = [next(again)]
            let_on(gated)
            heard_again, heard = begun + list(again), list(first)
    assert text_of(heard) == text_of(heard_again)
    assert text_of(heard)[0]
    assert len(gated.turns(session)) == 1


SEPARATED = "a\u2028b\u2029c\x85d\u2027 \u202a \xc2 \x84" * 20
"""`str.splitlines`, and so httpx' `iter_lines`, takes three of these characters for the end of a line."""


@pytest.mark.parametrize("path", PATHS)
def test_each_event_is_one_line_for_every_client(gated: RunningGateway, path: str) -> None:
    session = gated.session()
    gated.engine.stall_after = 100
    gated.engine.script.appendleft(SEPARATED)
    with streaming(gated, session, path, 0) as first:
        asked(gated, 1)
        with streaming(gated, session, path, 1) as again:
            let_on(gated)
            told = [list(lines) for lines in (first, again)]
    for lines in told:
        assert all(not line or line.startswith(("data: {", "data: [DONE]", "event: ", ":")) for line in lines)
        assert text_of(lines)[0] == SEPARATED
    (turn,) = gated.turns(session)
    assert gated.engine.tokenizer.decode(turn["output_ids"]) == SEPARATED  # without its end token
    rows = gated.call("GET", "/admin/export", key=ADMIN_KEY)
    assert [type(json.loads(line)) for line in rows.iter_lines()] == [dict]
