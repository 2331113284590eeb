"""A small deployment for `weir doctor`: real Redis, gateway and trainer interface, a fake rollout server."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from gateway.app import create_app as create_gateway
from gateway.settings import GatewaySettings
from rollout_queue.http.callers import Keyring
from rollout_queue.protocol.conditions import Problem
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from tests.support.gateway.fake_rollout_server import FakeRolloutServer
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY
from tests.support.redis_process import RedisProcess
from tests.support.serving import serving
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.app import create_app as create_trainer
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore
from weir.doctor.doctor import examine
from weir.doctor.targets import Targets

DEPENDS_ON_THE_MACHINE = {"memory_short", "redis_lacks_fixes"}
"""What a busy test machine may have, whatever the test."""


@dataclass
class ExaminedSystem:
    """The parts, and how to examine them."""

    redis: RedisProcess
    gateway_url: str
    server_url: str
    trainer_url: str
    server: FakeRolloutServer
    directory: Path
    trainer: SharedState
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problems(self, **targets: Any) -> dict[str, str]:
        """The sentence of each problem, by its check."""
        return {problem.check: problem.sentence for problem in self.examined(**targets)}

    def examined(self, **targets: Any) -> Sequence[Problem]:
        given: dict[str, Any] = {
            "gateway_url": self.gateway_url,
            "redis_url": self.redis.url,
            "admin_key": ADMIN_KEY,
            "settings": self.settings,
            "patience_s": PATIENCE_S,
        }
        found = examine(Targets(**given | targets)).problems
        return [each for each in found if each.check not in DEPENDS_ON_THE_MACHINE]

    def report(self, **fields: Any) -> None:
        """Let the trainer report, as it does twice a second."""
        said: dict[str, Any] = {"state": "waiting", "url": self.trainer_url, "source": "turns"}
        report = TrainerReport(**said | fields)
        self.redis.client.delete(key_names.TRAINER)
        self.redis.client.hset(key_names.TRAINER, mapping=report.fields())  # type: ignore[arg-type]

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.request(method, self.gateway_url + path, json=body, headers=headers, timeout=120)

    def until(self, state: str) -> None:
        """Wait until the gateway sees the rollout server in this state."""

        def seen() -> bool:
            data = self.admin("GET", "/admin/rollout_servers").json()["data"]
            return [each["state"] for each in data] == [state]

        wait_until(seen)


@contextmanager
def examined_system(directory: Path, model_path: Path, **gateway: Any) -> Iterator[ExaminedSystem]:
    """Start the parts. The rollout server is registered and serves version 0."""
    with ExitStack() as started:
        redis = RedisProcess(directory / "redis").start(maxmemory="256mb")
        started.callback(redis.close)
        server = FakeRolloutServer()
        server_url = started.enter_context(serving(server.app()))
        state = SharedState()
        state.ready = True
        store = PolicyStore(directory / "policies", model_path, 2)
        trainer = create_trainer(
            state, lambda _since, _limit: [], store, Keyring([], [ADMIN_KEY]), CollectorRegistry()
        )
        trainer_url = started.enter_context(serving(trainer))
        given: dict[str, Any] = {
            "redis_url": redis.url,
            "model_path": model_path,
            "client_keys": [CLIENT_KEY],
            "admin_keys": [ADMIN_KEY],
            "poll_every_s": 0.2,
        }
        url = started.enter_context(serving(create_gateway(GatewaySettings(**given | gateway))))
        system = ExaminedSystem(redis, url, server_url, trainer_url, server, directory, state)
        body = {"id": "r0", "url": server_url, "engine_url": server_url}
        assert system.admin("POST", "/admin/rollout_servers", body).status_code == 200
        system.until("ready")
        yield system
