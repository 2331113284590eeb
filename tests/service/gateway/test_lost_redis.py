"""A gateway whose Redis is gone."""

from pathlib import Path

from tests.support.gateway.running import Backends
from tests.support.redis_process import RedisProcess
from tests.support.waiting import wait_until


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
