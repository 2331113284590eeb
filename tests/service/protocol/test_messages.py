"""Checks each message between two services, from the code that sends it to the code that reads it.

A gateway and a rollout server run with their own HTTP clients, on a real Redis; only SGLang is a fake. The
trainer's part is played by its own client, heartbeat and routes.
"""

import asyncio
import io
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from redis import Redis
from rich.console import Console

from gateway.app import create_app as gateway_app
from gateway.callers.backpressure import TrainerBacklog, read_backpressure
from gateway.settings import GatewaySettings
from rollout_queue.http.callers import Keyring
from rollout_queue.protocol.gateway_messages import Pushed, PushResult, ServerPage, ServerStatus, SystemStatus
from rollout_queue.protocol.message import ErrorReply, MalformedMessage
from rollout_queue.protocol.rollout_server_messages import ReloadBody, Reloaded
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_server.app import create_app as rollout_app
from rollout_server.registration import RegistrationClient, addresses
from rollout_server.server import RolloutServer
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.locations import WantedPolicy
from tests.support.claimed import claimed_reader
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.weights import (
    float32_tensors,
    publish,
    published_copy,
    write_model,
    write_safetensors,
)
from tests.support.serving import free_port, serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.app import create_app as trainer_app
from trainer_service.heartbeat import Heartbeat, watch_disk
from trainer_service.publishing.gateway_client import GatewayClient, VersionTaken, VersionUnknown
from trainer_service.shared_state import Backlog, SharedState
from trainer_service.storage.policy_store import PolicyStore
from weir.demo.report import served_versions
from weir.doctor.doctor import examine
from weir.doctor.targets import Targets
from weir.stack.service_process import http_ready, system_status
from weir.status import details_from
from weir.top import show_once

KEY = "admin-key"
HEADERS = {"authorization": f"Bearer {KEY}"}


@dataclass
class Services:
    """A gateway and one rollout server that is registered with it."""

    redis_url: str
    redis: Redis
    gateway_url: str
    settings: RolloutServerSettings
    directory: Path

    def policy(self, version: int) -> tuple[str, str]:
        """A valid published version: its location, and the SHA-256 of its manifest."""
        directory = self.directory / "policies" / f"v{version}"
        published_copy(self.directory / "model", directory, version)
        write_safetensors(directory / "model.safetensors", float32_tensors(1.0 + version))
        return directory.as_uri(), publish(directory, version)

    def get(self, path: str) -> httpx.Response:
        """What the gateway answers an operator."""
        return httpx.get(self.gateway_url + path, headers=HEADERS, timeout=300)

    def reload(self, body: Any) -> httpx.Response:
        """What the rollout server answers the gateway."""
        url = f"{addresses(self.settings).url}/reload"
        return httpx.post(url, json=body, headers=HEADERS, timeout=300)

    def server_status(self) -> ServerStatus:
        url = f"{addresses(self.settings).url}/status"
        return ServerStatus.read(httpx.get(url, headers=HEADERS, timeout=300).content)

    def system_status(self) -> SystemStatus:
        return system_status(self.gateway_url, KEY)

    def register(self, **settings: str) -> tuple[WantedPolicy | None, bool]:
        """Register once more: what the gateway names, and whether it accepted the registration."""

        process = self.server_status().process

        async def announced() -> tuple[WantedPolicy | None, bool]:
            async with httpx.AsyncClient(timeout=120) as http:
                assert process is not None
                client = RegistrationClient(self.settings.model_copy(update=settings), http, process)
                return await client.announce(), client.reached

        return asyncio.run(announced())


@pytest.fixture(scope="module")
def services(
    redis_url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    directory = tmp_path_factory.mktemp("services")
    own = f"{redis_url.removesuffix('0')}2"
    gateway_settings = GatewaySettings(
        redis_url=own, model_path=tiny_model, engines=[], admin_keys=[KEY], poll_every_s=0.02
    )
    with redis_at(own) as redis, serving(gateway_app(gateway_settings)) as gateway_url:
        settings = RolloutServerSettings(
            model_path=write_model(directory / "model"),
            weights_dir=directory / "weights",
            policies_dir=directory / "policies",
            port=free_port(),
            admin_keys=[KEY],
            gateway_url=gateway_url,
            register_every_s=60.0,
            drain_timeout_s=0.02,
        )
        engine = FakeEngine()
        server = RolloutServer(
            settings,
            httpx.AsyncClient(transport=httpx.MockTransport(engine.handle), base_url="http://engine"),
            httpx.AsyncClient(timeout=120),
            engine.start,
            settings.weights_dir,
            float32_engine=True,
        )
        with serving(rollout_app(server, Keyring(admin_keys=[KEY])), settings.port):
            asyncio.run(_until_ready(addresses(settings).url))
            services = Services(own, redis, gateway_url, settings, directory)
            assert services.register() == (None, True), "the fleet serves the version that has no location"
            yield services


async def _until_ready(url: str) -> None:
    ready = http_ready(url)
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(ready) is not None:  # noqa: ASYNC110 - the server runs in another thread
            await asyncio.sleep(0.01)  # the server starts in another thread


@pytest.fixture
def trainer(services: Services) -> Iterator[GatewayClient]:
    with httpx.Client(base_url=services.gateway_url, headers=HEADERS, timeout=120) as client:
        yield GatewayClient(client, push_timeout_s=30.0)


def pushed(trainer: GatewayClient, version: int, location: str, digest: str) -> tuple[PushResult, ...]:
    """Announce a version; return what each server did once the push has ended."""
    assert trainer.announce(version, location, digest, step=7).state == "pushing"

    def ended() -> bool:
        push = trainer.push_of(version).push
        return push is not None and push.state == "serving"

    wait_until(ended)
    return trainer.push_of(version).results


def refused_by_server(services: Services, version: int, location: str, digest: str) -> PushResult:
    """What the one server says of a version that an operator publishes."""
    body = {"version": version, "location": location, "manifest_sha256": digest}
    reply = httpx.post(f"{services.gateway_url}/admin/policies", json=body, headers=HEADERS, timeout=300)
    assert reply.status_code == 207
    (result,) = Pushed.read(reply.content).results
    return result


def test_a_registration_and_the_servers_status_reach_the_gateway(services: Services) -> None:
    (seen,) = ServerPage.read(services.get("/admin/rollout_servers").content).data
    own, settings = services.server_status(), services.settings
    assert (seen.id, seen.url, seen.engine_url) == (settings.name, *addresses(settings))
    assert own.id == settings.name
    serving = services.system_status().policy.serving
    assert (seen.state, seen.version) == (own.state, own.version) == ("ready", serving)
    assert seen.last_seen is not None
    assert own.engine_url == addresses(settings).engine_url
    assert (own.restarts, own.running, own.waiting) == (0, 2, 1)


def test_a_registration_that_the_gateway_would_refuse_is_not_sent(services: Services) -> None:
    assert services.register(public_url="rollout:8100") == (None, False)
    body = {"id": "rollout-0", "url": "rollout:8100", "engine_url": "http://engine"}
    url = f"{services.gateway_url}/admin/rollout_servers"
    refused = httpx.post(url, json=body, headers=HEADERS, timeout=300)
    detail = ErrorReply.read(refused.content).error
    assert (refused.status_code, detail.type, detail.param) == (400, "invalid_request_error", "url")


def test_a_version_goes_from_the_trainer_through_the_gateway_to_the_rollout_server(
    services: Services, trainer: GatewayClient
) -> None:
    version = trainer.newest_version() + 1
    location, digest = services.policy(version)
    (result,) = pushed(trainer, version, location, digest)
    assert (result.server, result.ok, result.version_served) == (services.settings.name, True, version)
    assert result.error is None
    assert 0 < (result.paused_s or 0) < result.total_s
    served = services.server_status()
    assert (served.version, served.manifest_sha256) == (version, digest)
    assert trainer.newest_version() == version
    assert trainer.serves(version)
    assert not trainer.remove(version)
    assert version in served_versions(services.gateway_url, KEY)
    assert services.register() == (WantedPolicy(version, location, digest), True)


def test_a_refusal_is_told_in_the_words_of_the_service_that_refuses(
    services: Services, trainer: GatewayClient
) -> None:
    version = trainer.newest_version() + 1
    result = refused_by_server(services, version, "file:///elsewhere", "a" * 64)
    assert (result.ok, result.version_served) == (False, None)
    assert "in no allowed directory" in (result.error or "")
    assert trainer.newest_version() < version, "a version that every server refuses takes no number"
    with pytest.raises(VersionUnknown, match=f"no policy has version {version}"):
        trainer.push_of(version)
    location, digest = services.policy(version)
    pushed(trainer, version, location, digest)
    with pytest.raises(VersionTaken, match=f"version {version} is known with other content"):
        trainer.announce(version, "file:///elsewhere", "b" * 64, step=7)
    with pytest.raises(VersionUnknown, match="no policy has version 1000"):
        trainer.roll_back(1000)
    (result,) = trainer.roll_back(0)
    assert (result.ok, result.version_served) == (True, 0), "a rollback is forced upon every server"
    assert trainer.serves(0)
    assert services.server_status().version == 0


def test_a_digest_that_no_rollout_server_takes_is_refused_in_its_words(
    services: Services, trainer: GatewayClient
) -> None:
    body = {"version": 1, "location": "file:///elsewhere", "manifest_sha256": "a digest"}
    refused = services.reload(body)
    result = refused_by_server(services, trainer.newest_version() + 1, "file:///elsewhere", "a digest")
    assert (refused.status_code, result.ok) == (400, False)
    assert result.error == ErrorReply.read(refused.content).error.message


def test_a_rollout_server_says_how_long_each_part_of_a_reload_took(services: Services) -> None:
    version = services.server_status().version
    assert version is not None
    location, digest = services.policy(version + 1000)
    asked = ReloadBody(version=version + 1000, location=location, manifest_sha256=digest)
    told = Reloaded.read(services.reload(asked.model_dump()).content)
    assert (told.ok, told.version) == (True, version + 1000)
    assert told.seconds is not None
    assert min(told.seconds.fetch, told.seconds.verify, told.seconds.load, told.paused_s or 0) > 0
    back = ReloadBody(version=version, force=True)
    assert services.reload(back.model_dump()).status_code == 200


@pytest.fixture
def shared_state(services: Services) -> Iterator[SharedState]:
    """The shared state of a trainer that has paused at step 12, and has reported it."""
    state = SharedState()
    heartbeat = Heartbeat(claimed_reader(services.redis), state, retry_s=0.01)
    heartbeat.note(12, 4, {"loss": 0.5, "kl": float("nan")})
    heartbeat.note_evaluations({"eval/reward": 0.25})
    heartbeat.note_backlog(Backlog(waiting=3, owed=2, per_step=8.5))
    heartbeat.beat("paused", "POST /resume")
    yield state
    state.stop()


async def test_the_trainers_report_reaches_those_who_decide_on_sessions(
    services: Services, shared_state: SharedState
) -> None:
    async with async_redis_at(services.redis_url) as redis:
        pressure = await read_backpressure(redis)
    assert pressure.trainer == TrainerBacklog(
        version=4,
        rollouts_waiting=3,
        rollouts_owed=2,
        rollouts_per_step=8.5,
        last_seen=shared_state.snapshot.last_seen,
        state="paused",
        refuses_training=False,
    )


def test_the_trainers_report_reaches_the_operators_pages(
    services: Services, shared_state: SharedState
) -> None:
    said = shared_state.snapshot.report()
    status = services.system_status()
    metrics = {"loss": 0.5, "kl": None, "eval/reward": 0.25}
    assert status.trainer == said.model_copy(update={"metrics": metrics})
    assert "the trainer is paused and waits for POST /resume" in status.warnings
    assert details_from(status)["trainer_service"] == (
        "state paused, step 12, version 4; waits for POST /resume"
    )
    assert services.get("/admin/pipeline").json()["trainer"] == "POST /resume"


def test_what_a_newer_trainer_reports_is_shown_and_what_cannot_be_read_is_left_out(
    services: Services, shared_state: SharedState
) -> None:
    said: dict[str, str] = {"rank": "3", "step": "twelve"}
    services.redis.hset("weir:trainer", mapping=said)  # type: ignore[arg-type]
    shown = services.get("/admin/status").json()["trainer"]
    assert (shown["rank"], shown["version"], "step" in shown) == (3, 4, False)
    services.redis.delete("weir:trainer")
    assert services.system_status().trainer == TrainerReport()
    assert services.get("/admin/status").json()["trainer"] == {}


def test_operators_read_everywhere_that_the_disk_of_the_checkpoints_is_nearly_full(
    services: Services,
    shared_state: SharedState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    turned: TurnedClock,
) -> None:
    machines = shutil.disk_usage(tmp_path)
    free = [4 * 2**30, 5 * 2**30]

    def usage(of: Path) -> object:
        assert (of, threading.current_thread().name) == (tmp_path, "disk")
        return machines._replace(total=100 * 2**30, free=free[0])

    heartbeat = Heartbeat(claimed_reader(services.redis), shared_state, retry_s=0.01)

    def status() -> SystemStatus:
        heartbeat.beat("training")
        return services.system_status()

    monkeypatch.setattr(shutil, "disk_usage", usage)
    watch_disk(tmp_path, shared_state)
    wait_until(lambda: shared_state.disk)
    warned = status()
    (sentence,) = [each for each in warned.warnings if "disk" in each]
    assert sentence == (
        "the disk of the trainer's checkpoints is nearly full: 4.0 of 100.0 GiB are free: free space "
        "there, or lower trainer.keep_checkpoints and trainer.keep_policies"
    )
    assert sentence in details_from(warned)["gateway"]
    shown = io.StringIO()
    assert show_once(services.gateway_url, KEY, Console(file=shown, width=80))
    assert sentence in " ".join(shown.getvalue().split())
    targets = Targets(
        gateway_url=services.gateway_url,
        admin_key=KEY,
        redis_url=services.redis_url,
        patience_s=PATIENCE_S,
    )
    assert sentence in [each.sentence for each in examine(targets).problems]
    alone = replace(targets, gateway_url=f"http://127.0.0.1:{free_port()}")
    found = {each.check: f"{each.sentence}: {each.advice}" for each in examine(alone).problems}
    assert found["disk_nearly_full"] == sentence
    free.pop(0)
    assert turned.turn_until(lambda: not any("disk" in each for each in status().warnings), 1.0)


def test_the_trainers_own_status_is_a_part_of_its_report(shared_state: SharedState, tmp_path: Path) -> None:
    store = PolicyStore(tmp_path / "policies", tmp_path, keep=2)
    app = trainer_app(shared_state, lambda *_: [], store, Keyring(admin_keys=[KEY]), CollectorRegistry())
    status = TrainerReport.read(TestClient(app, headers=HEADERS).get("/status").content)
    assert (status.state, status.step, status.version) == ("paused", 12, 4)
    assert status.metrics == {"loss": 0.5, "kl": None, "eval/reward": 0.25}
    refused = ErrorReply.read(TestClient(app).get("/status").content).error
    assert refused.type == "authentication_error"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"<html>welcome</html>", "body: "),
        (b"[]", "body: "),
        (b'{"version": 1}', "state: Field required"),
        (b'{"state": "ready", "version": "1"}', "version: Input should be a valid integer"),
    ],
)
def test_an_answer_in_other_words_is_malformed_and_says_where(body: bytes, fault: str) -> None:
    with pytest.raises(MalformedMessage, match=f"not a ServerStatus: {fault}"):
        ServerStatus.read(body)


def test_a_reader_ignores_what_a_newer_sender_adds() -> None:
    read = ServerStatus.read(b'{"state": "ready", "version": 1, "mood": "good"}')
    assert read == ServerStatus(state="ready", version=1)
