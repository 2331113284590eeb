"""The services of a stack in the test's own process. Only Redis and SGLang are processes.

agents ─▶ gateway ─▶ SGLang ◀─ rollout server
             └─▶ Redis ─▶ trainer (a thread)
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.app import create_app as create_gateway
from gateway.settings import GatewaySettings
from rollout_queue.http.callers import Keyring
from rollout_server.app import create_app as create_rollout_server
from rollout_server.engine.command import find_device
from rollout_server.server import build_server
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.weights_store import claim_weights
from tests.support.redis_process import RedisProcess
from tests.support.serving import serving
from tests.support.waiting import wait_until
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from weir.stack.services import determined_sections
from weir.stack.settings import StackSettings

BOOTS_WITHIN_S = 1200.0
"""How long an engine may take to start on a busy machine."""


@dataclass(frozen=True)
class ServicesHere:
    """Where the services are. `redis` is the process, which a test may stop."""

    redis: RedisProcess
    gateway_url: str
    rollout_url: str
    trainer_url: str


@contextmanager
def services_here(settings: StackSettings) -> Iterator[ServicesHere]:
    """Serve what `Stack(settings)` would start. All are ready."""
    with ExitStack() as stack:
        redis = RedisProcess(settings.run_dir / "redis")
        stack.callback(redis.close)
        redis.start()
        sections = determined_sections(settings.model_copy(update={"redis_port": redis.port}))
        trainer_url = stack.enter_context(_trainer(settings, sections["trainer"]))
        gateway_url = stack.enter_context(_gateway(settings, sections["gateway"]))
        rollout_url = stack.enter_context(_rollout_server(settings, sections["rollout_server"]))
        for url in (gateway_url, rollout_url, trainer_url):
            wait_until(lambda: _ready(url), BOOTS_WITHIN_S)  # noqa: B023 - called in the same iteration
        yield ServicesHere(redis, gateway_url, rollout_url, trainer_url)


def _keys(settings: StackSettings) -> dict[str, Any]:
    names = ("client_keys", "admin_keys", "rollout_server_key", "trainer_key")
    return {name: getattr(settings, name) for name in names}


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=120).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def _gateway(settings: StackSettings, section: dict[str, Any]) -> Iterator[str]:
    given = GatewaySettings(**_keys(settings), **section)
    with serving(create_gateway(given), given.port) as url:
        yield url


@contextmanager
def _rollout_server(settings: StackSettings, section: dict[str, Any]) -> Iterator[str]:
    given = RolloutServerSettings(
        admin_keys=settings.admin_keys, rollout_server_key=settings.rollout_server_key, **section
    )
    claim = claim_weights(given)
    server = build_server(given, find_device(given.engine_device), claim.directory)
    keyring = Keyring(admin_keys=given.admin_keys, rollout_server_key=given.rollout_server_key)
    # uvloop starts processes in the main thread only.
    with ExitStack() as held:
        held.callback(claim.release)
        yield held.enter_context(serving(create_rollout_server(server, keyring), given.port, loop="asyncio"))


@contextmanager
def _trainer(settings: StackSettings, section: dict[str, Any]) -> Iterator[str]:
    from trainer_service.__main__ import serve  # loads torch
    from trainer_service.sizing import find_gpu, resolved

    given = TrainerSettings(**_keys(settings), **section)
    given = resolved(given, find_gpu(given), 1)
    keyring = Keyring(given.client_keys, given.operators_keys, given.rollout_server_key)
    state = SharedState()
    thread = threading.Thread(target=serve, args=(given, keyring, state), name="trainer", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{given.port}"
    finally:
        state.stop()
        thread.join(BOOTS_WITHIN_S)
        assert not thread.is_alive(), "the trainer does not end"
