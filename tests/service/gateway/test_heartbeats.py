"""Heartbeats: a stream opens with 200 only once an engine works on the answer."""

from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.gated_engine import let_on
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.serving import free_port

CALL = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
HEADERS = {"authorization": f"Bearer {CLIENT_KEY}"}
HEARTBEAT_S, ENGINE_WAIT_S = 0.3, 1.5
"""A call waits for an engine longer than several heartbeats take."""


@pytest.mark.parametrize("engine", ["none", "busy", "lost"])
def test_a_stream_that_no_engine_takes_is_a_503(backends: Backends, engine: str) -> None:
    settings: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "engine_wait_s": ENGINE_WAIT_S}
    if engine == "none":
        settings["engines"] = [f"http://127.0.0.1:{free_port()}"]
    backends.clear(None)
    with backends.gateway(**settings) as gateway:
        if engine != "none":
            backends.engine.refusals.extend(PlainTextResponse("busy", 503) for _ in range(200))
        if engine == "lost":
            backends.engine.refusals.appendleft(None)
            backends.engine.interruptions.append(Interruption(0, "reset"))
        reply = gateway.http.post(gateway.url + "/v1/chat/completions", json=CALL, headers=HEADERS)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_unavailable")
        assert reply.headers["retry-after"]


def test_a_stream_that_an_engine_works_on_is_kept_alive(gated: RunningGateway, backends: Backends) -> None:
    gated.engine.stall_after = 0
    with (
        backends.gateway(heartbeat_s=HEARTBEAT_S) as gateway,
        gateway.http.stream(
            "POST", gateway.url + "/v1/chat/completions", json=CALL, headers=HEADERS
        ) as reply,
    ):
        lines = reply.iter_lines()
        assert (reply.status_code, next(lines)[:1]) == (200, ":")
        let_on(gated)
        assert [line for line in lines if line][-1] == "data: [DONE]"
