"""A Redis that does not answer for a while: a call that was told to have failed is never trained."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.calls import Call
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.redis_process import RedisProcess
from tests.support.serving import serving
from tests.support.waiting import wait_until


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start()
    yield process
    process.process.send_signal(signal.SIGCONT)
    process.close()


@pytest.fixture
def gateway(redis: RedisProcess, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[RunningGateway]:
    backends = Backends(redis.url, tiny_model, tokenizer, redis.client, FakeEngine(tokenizer))
    with serving(backends) as backends.engine_url, backends.gateway() as running:
        wait_until(lambda: running.get("/ready").status_code == 200)
        yield running


def test_a_turn_whose_client_was_told_that_it_failed_is_not_trained(
    gateway: RunningGateway, redis: RedisProcess
) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}"
    gateway.chat(path=f"{path}/v1/chat/completions")  # the gateway's connection to Redis is open from here on
    gateway.engine.pace_s = 0.5  # the call has looked its session up when Redis stops
    with ThreadPoolExecutor(1) as pool:
        call = Call(gateway, session, stream=False)
        call.line.settimeout(300)
        answer = pool.submit(call.answer)
        wait_until(lambda: len(gateway.engine.requests) == 2)
        redis.process.send_signal(signal.SIGSTOP)
        status, body = answer.result()
    assert (status, b"storage_unavailable" in body) == (503, True)
    redis.process.send_signal(signal.SIGCONT)
    gateway.engine.pace_s = 0.0
    wait_until(lambda: gateway.get("/ready").status_code == 200)
    again = gateway.chat(path=f"{path}/v1/chat/completions").headers["x-weir-turn-id"]
    wait_until(
        lambda: gateway.post(f"{path}/finish", {"status": "completed", "reward": 1}).status_code == 200
    )
    ready = [turn["turn_id"] for turn in gateway.turns(session) if turn["verdict"]["code"] == "ready"]
    assert ready[1:] == [again]
    assert len(ready) == 2
