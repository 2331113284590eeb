"""`GET /admin/learning`: the gateway passes the trainer's curves on, with the admin key only."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rollout_queue.http.keys import Keyring
from rollout_queue.redis import keys
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway
from tests.support.serving import free_port
from trainer_service.app import HttpThread, create_app
from trainer_service.settings import GuardSettings
from trainer_service.sinks.curves import Curves
from trainer_service.sinks.limits import limits_of
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore


@pytest.fixture
def run_of_steps(gateway: RunningGateway, tmp_path: Path) -> Iterator[int]:
    """A trainer with the file of a run of so many steps."""
    steps, path, port = 5000, tmp_path / "metrics.jsonl", free_port()
    lines = (json.dumps({"step": n, "version": n, "reward_mean": n / steps}) for n in range(1, steps + 1))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    store, keyring = PolicyStore(tmp_path / "policies", tmp_path, keep=4), Keyring([CLIENT_KEY], [ADMIN_KEY])
    curves = Curves(path, limits_of(GuardSettings()))
    app = create_app(SharedState(), lambda *_: [], store, keyring, CollectorRegistry(), curves=curves)
    with HttpThread(app, "127.0.0.1", port):
        report = {"last_seen": time.time(), "url": f"http://127.0.0.1:{port}"}
        gateway.redis.hset(keys.TRAINER, mapping=report)  # type: ignore[arg-type]
        yield steps


def learning(gateway: RunningGateway, query: str, **more: Any) -> Any:
    return gateway.get(f"/admin/learning?{query}", key=ADMIN_KEY, **more)


def test_a_long_run_has_no_more_points_than_buckets(gateway: RunningGateway, run_of_steps: int) -> None:
    reply = learning(gateway, "metrics=reward_mean,none&buckets=100").json()
    series = reply["series"]["reward_mean"]
    assert [len(series[name]) for name in ("steps", "min", "mean", "max")] == [100] * 4
    assert (reply["first"], reply["last"], reply["bucket_steps"], reply["complete"]) == (1, 5000, 50, True)
    assert series["max"][-1] == 1.0
    assert reply["series"]["none"]["steps"] == []
    assert {limit["metric"]: limit["most"] for limit in reply["limits"]}["mismatch/kl"] == 0.2
    near = learning(gateway, "metrics=reward_mean&from=100&to=109").json()["series"]["reward_mean"]
    assert near["steps"] == list(range(100, 110))


def test_bad_questions_are_refused(gateway: RunningGateway, run_of_steps: int) -> None:
    assert gateway.get("/admin/learning").status_code == 403
    many = ",".join(f"m{n}" for n in range(33))
    for bad in ("buckets=0", "buckets=1001", "from=-1", "to=x", f"metrics={'m' * 2001}", f"metrics={many}"):
        assert learning(gateway, bad).status_code == 400, bad


def test_without_a_trainer_the_reason_is_said(gateway: RunningGateway) -> None:
    refused = learning(gateway, "metrics=loss")
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "trainer_unavailable")
