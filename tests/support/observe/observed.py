"""Real services that have served calls, made a step and pushed a version, for Prometheus and for traces."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from reward_service.dispatch.reward_rules import HttpRule
from tests.support.gateway.conversation import path_of
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.observe.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.redis_process import RedisProcess
from tests.support.reward_service.running import reward_service
from tests.support.rollout_server.processes import running
from tests.support.rollout_server.stub_engine import stub_interpreter
from tests.support.rollout_server.weights import write_model
from tests.support.serving import free_port
from tests.support.system import local_system
from tests.support.system.local_system import Service, open_local_system
from tests.support.waiting import wait_until

AGENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
AGENT_SPAN = "00f067aa0ba902b7"
COLLECTOR_KEY = "a-key-of-the-collector"
SECRET_WORDS = "the-words-of-a-prompt"
STEP_WITHIN_S = 900.0
"""Several processes start at once, and the machine may be busy."""


@dataclass
class Observed:
    """The addresses of the services, and what the agent did."""

    gateway: RunningGateway
    trainer: Service
    pushing: RunningGateway
    """A gateway whose rollout server got a version."""
    urls: dict[str, list[str]]
    """By the job's name in Prometheus."""
    receiver: OtlpReceiver
    turn_ids: list[str]
    directory: Path
    """Of the rollout server: its model, and where versions may be."""


@contextmanager
def observed_system(model: Path, tokenizer: Tokenizer, root: Path) -> Iterator[Observed]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as environment:
        receiver = stack.enter_context(otlp_receiver())
        otel = {
            "endpoint": receiver.url,
            "sample_ratio": 0,
            "headers": {"x-collector-key": COLLECTOR_KEY},
            "export_every_s": 0.2,
        }
        environment.setenv("WEIR_OTEL", json.dumps(otel))
        environment.setattr(local_system, "STARTS_WITHIN_S", STEP_WITHIN_S)
        redis = RedisProcess(root / "redis").start()
        stack.callback(redis.close)
        backends = Backends(redis.url, model, tokenizer, redis.client, FakeEngine(tokenizer))
        local = open_local_system(backends, redis, root, stack)
        service, gateway = local.gateway(POLL_EVERY_S="0.1")
        trainer = local.trainer(
            service, ALGORITHM__MIN_LIVE_ROWS="2", ALGORITHM__FLUSH_AFTER_S="0.5", PUBLISH_EVERY_STEPS="1"
        )
        pushing, server = stack.enter_context(_pushing(backends, root / "pushing"))
        rule = HttpRule(kind="http", name="graded", url="http://127.0.0.1:9/grade")
        rewards = stack.enter_context(reward_service(gateway_url=gateway.url, rules=[rule]))
        trainer.until("/ready")
        turn_ids = _play(gateway)
        wait_until(lambda: trainer.until("/status")["step"] >= 1, STEP_WITHIN_S)
        environment.undo()  # other tests of this process start services, too
        yield Observed(
            gateway=gateway,
            trainer=trainer,
            pushing=pushing,
            urls={
                "gateway": [gateway.url, pushing.url],
                "trainer": [trainer.url],
                "rollout_server": [server],
                "rewards": [rewards.url],
            },
            receiver=receiver,
            turn_ids=turn_ids,
            directory=root / "pushing",
        )


def _play(gateway: RunningGateway) -> list[str]:
    """A group of two sessions with different rewards. The first call of each belongs to the agent's trace."""
    group = gateway.post("/groups", {"size": 2}).json()["sessions"]
    turn_ids = []
    for reward, session in enumerate(group):
        headers = {"traceparent": f"00-{AGENT_TRACE}-{AGENT_SPAN}-01"}
        reply = gateway.chat(SECRET_WORDS, path=path_of(session), headers=headers, stream=bool(reward))
        assert reply.status_code == 200, reply.text
        turn_ids += [reply.headers["x-weir-turn-id"]]
        ended = gateway.post(
            f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": float(reward)}
        )
        assert ended.status_code == 200, ended.text
    return turn_ids


@contextmanager
def _pushing(backends: Backends, directory: Path) -> Iterator[tuple[RunningGateway, str]]:
    """A gateway and a rollout server with an engine double."""
    directory.mkdir()
    write_model(directory / "model")
    shutil.copy(backends.model_path / "tokenizer.json", directory)
    own = Backends(
        backends.redis_url.removesuffix("/0") + "/1",
        backends.model_path,
        backends.tokenizer,
        backends.redis,
        backends.engine,
    )
    process, url = Processes(own, directory).start(engines="", poll_every_s=0.1, push_lease_s=1)
    gateway = RunningGateway(url, own.engine, own.redis)
    try:
        port = free_port()
        given: dict[str, Any] = {
            "id": "r0",
            "port": port,
            "engine_port": free_port(),
            "engine_python": stub_interpreter(directory),
            "engine_device": "cpu",
            "model_path": directory / "model",
            "gateway_url": url,
            "register_every_s": 0.5,
            "weights_dir": directory / "weights",
            "policies_dir": directory / "policies",
        }
        with running(directory, given):
            wait_until(lambda: _servers(gateway) == ["ready"], STEP_WITHIN_S)
            yield gateway, f"http://127.0.0.1:{port}"
    finally:
        gateway.http.close()
        process.kill()
        process.wait()


def _servers(gateway: RunningGateway) -> list[str]:
    try:
        page = gateway.get("/admin/rollout_servers", key=ADMIN_KEY).json()
    except httpx.TransportError:  # it is starting
        return []
    return [server["state"] for server in page["data"]]
