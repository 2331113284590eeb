"""After SIGTERM, a gateway first tells load balancers. An answer that it cannot finish ends with an error."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_queue.redis import keys
from tests.support.gateway.calls import RETRY
from tests.support.gateway.gated_engine import GatedEngine
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.gateway.streams import text_of
from tests.support.redis_process import RedisProcess
from tests.support.waiting import wait_until

ENDS_WITHIN_S = 120.0


@pytest.fixture
def gated_engine(processes: Processes) -> Iterator[GatedEngine]:
    """An engine that stops after three tokens of each answer."""
    engine = GatedEngine(processes.backends.tokenizer, stall_after=3, mind=[5] * 100)
    processes.backends.clear(None)
    processes.backends.engine = engine
    yield engine
    engine.open = True


class Reading:
    """One call in a thread: its status, and what arrived until its end."""

    def __init__(self, gateway: RunningGateway, **more: Any) -> None:
        self.status = 0
        self.lines: list[str] = []
        self.failure: Exception | None = None
        self._url, self._more = gateway.url, more
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"authorization": f"Bearer {CLIENT_KEY}", **self._more.pop("headers", {})}
        path = self._more.pop("path", "/v1/chat/completions")
        said = [{"role": "user", "content": "hi"}]
        body = {"input": said} if path == "/v1/responses" else {"max_tokens": 90, "messages": said}
        body |= self._more
        try:
            with httpx.stream("POST", self._url + path, json=body, headers=headers, timeout=300) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.failure = error

    def end(self) -> "Reading":
        self._thread.join(ENDS_WITHIN_S)
        assert not self._thread.is_alive()
        assert self.failure is None
        return self


def test_a_gateway_that_leaves_says_so_first_and_takes_calls_for_a_while(
    processes: Processes, gated_engine: GatedEngine
) -> None:
    gated_engine.open = True
    with processes.gateway(leave_s=6) as (process, gateway):
        assert gateway.chat().headers.get("connection") != "close"
        process.terminate()
        wait_until(lambda: httpx.get(gateway.url + "/ready", timeout=120).status_code == 503)
        assert "leaves" in httpx.get(gateway.url + "/ready", timeout=120).json()["error"]["message"]
        assert httpx.get(gateway.url + "/live", timeout=120).status_code == 200
        reply = gateway.chat()
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        assert process.wait(ENDS_WITHIN_S) == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", httpx.URL(gateway.url).port or 0))


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", 'data: {"error":'),
        ("/v1/messages", "event: error"),
        ("/v1/responses", "event: error"),
    ],
)
def test_answers_beyond_the_drain_end_with_an_error(
    processes: Processes, gated_engine: GatedEngine, path: str, last: str
) -> None:
    with processes.gateway(drain_timeout_s=1) as (process, gateway):
        stream = Reading(gateway, path=path, stream=True, model="policy")
        wait_until(lambda: stream.lines)
        retry = Reading(gateway, path=path, stream=True, model="policy", headers={RETRY: "1"})
        wait_until(lambda: retry.lines)
        plain = Reading(gateway, path=path, model="policy")
        wait_until(lambda: len(gated_engine.requests) == 2)
        process.terminate()
        for each in (stream.end(), retry.end()):
            assert each.status == 200
            assert any(line.startswith(last) for line in each.lines), each.lines
            assert "data: [DONE]" not in each.lines
        assert text_of(stream.lines) == text_of(retry.lines)
        assert plain.end().status == 503
        error = json.loads("".join(plain.lines))["error"]
        assert error["type"] == "engine_unavailable"
        assert "stop" in error["message"]
        assert process.wait(ENDS_WITHIN_S) == 0
    assert processes.backends.redis.xlen(keys.STREAM) == 2


def test_no_engine_works_for_a_call_that_cannot_be_stored(backends: Backends, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    try:
        backends.clear(None)
        with backends.gateway(redis_url=redis.url) as gateway:
            wait_until(lambda: gateway.get("/ready").status_code == 200)
            assert gateway.chat("first").status_code == 200
            redis.kill()
            backends.engine.requests.clear()
            for stream in (False, True):
                reply = gateway.chat("second", stream=stream)
                assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")
            assert backends.engine.requests == []
    finally:
        redis.close()
