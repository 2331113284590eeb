"""Heartbeats: a stream opens with 200 only once an engine works on the answer."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from starlette.responses import PlainTextResponse

from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.gated_engine import let_on
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.serving import free_port
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

CALL = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
HEADERS = {"authorization": f"Bearer {CLIENT_KEY}"}
HEARTBEAT_S, ENGINE_WAIT_S = 10.0, 60.0
"""A call waits for an engine longer than several heartbeats take."""
T = TypeVar("T")


def meanwhile_turning(
    turned: TurnedClock, work: Callable[[], T], begun: Callable[[], bool] = lambda: True
) -> T:
    """What `work` returns. Once it has `begun`, time passes until then."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        wait_until(begun)
        turned.turn_until(working.done, HEARTBEAT_S / 2)
        return working.result()


@pytest.mark.parametrize("engine", ["none", "busy", "lost"])
def test_a_stream_that_no_engine_takes_is_a_503(backends: Backends, turned: TurnedClock, engine: str) -> None:
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
        url = gateway.url + "/v1/chat/completions"
        reply = meanwhile_turning(
            turned,
            lambda: gateway.http.post(url, json=CALL, headers=HEADERS),
            lambda: engine != "lost" or len(backends.engine.requests) > 1,
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_unavailable")
        assert reply.headers["retry-after"]


def test_a_stream_that_an_engine_works_on_is_kept_alive(
    gated: RunningGateway, backends: Backends, turned: TurnedClock
) -> None:
    gated.engine.stall_after = 0
    with backends.gateway(heartbeat_s=HEARTBEAT_S) as gateway:
        url = gateway.url + "/v1/chat/completions"
        call = gateway.http.build_request("POST", url, json=CALL, headers=HEADERS)
        reply = meanwhile_turning(turned, lambda: gateway.http.send(call, stream=True))
        lines = reply.iter_lines()
        assert (reply.status_code, next(lines)[:1]) == (200, ":")
        let_on(gated)
        assert [line for line in lines if line][-1] == "data: [DONE]"
