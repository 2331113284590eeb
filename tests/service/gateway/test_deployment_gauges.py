"""The gauges of what all gateways share: Redis, the queue, the trainer's report."""

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.redis_process import RedisProcess
from tests.support.serving import serving
from tests.support.waiting import wait_until


def gauge(gateway: RunningGateway, name: str) -> str | None:
    """The value of a series, as Prometheus reads it."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", gateway.get("/metrics").text, re.M)
    return found[1] if found else None


def test_the_state_at_the_last_poll_is_shown_and_a_redis_that_ends(
    tiny_model: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    redis = RedisProcess(tmp_path / "redis").start()
    backends = Backends(redis.url, tiny_model, tokenizer, redis.client, FakeEngine(tokenizer))
    try:
        with serving(backends) as backends.engine_url, backends.gateway() as gateway:
            wait_until(lambda: gauge(gateway, "weir_redis_up") == "1.0")
            assert gauge(gateway, "weir_trainer_seen_timestamp_seconds") == "NaN"
            assert gauge(gateway, 'weir_trainer_state{state="waiting"}') == "0.0"
            gateway.session()
            report = TrainerReport(
                state="waiting",
                version=3,
                last_seen=1e9,
                rollouts_waiting=7,
                rollouts_owed=2,
                rollouts_per_step=4.0,
            )
            fields: Any = report.fields()
            redis.client.hset(keys.TRAINER, mapping=fields)
            redis.client.xadd(keys.DEAD_LETTERS, {"error": "unreadable"})
            wait_until(lambda: gauge(gateway, "weir_rollouts_waiting") == "7.0")
            shown = {
                "weir_rollouts_owed": "2.0",
                "weir_rollouts_per_step": "4.0",
                "weir_trained_version": "3.0",
                "weir_trainer_seen_timestamp_seconds": "1e+09",
                'weir_trainer_state{state="waiting"}': "1.0",
                'weir_trainer_state{state="paused"}': "0.0",
                "weir_sessions_unfinished": "1.0",
                "weir_queue_dead_letters": "1.0",
                "weir_redis_max_bytes": "0.0",
                "weir_versions_held": "0.0",
            }
            assert {name: gauge(gateway, name) for name in shown} == shown
            redis.terminate()
            wait_until(lambda: gauge(gateway, "weir_redis_up") == "0.0")
            assert gauge(gateway, "weir_rollouts_waiting") == "7.0"
    finally:
        redis.close()
