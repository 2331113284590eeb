"""What operators reach and see over the gateway: the trainer, probes, default keys, an emptied Redis."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace as replaced
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.connection import Connection
from typer.testing import CliRunner

from gateway.fleet import registrations
from gateway.fleet.fleet_server import Registration
from gateway.operators.lost_keys import EMPTIED, LostKeys
from rollout_queue.contract.serving_plan import ServingPlan
from rollout_queue.http.callers import Keyring
from rollout_queue.http.http_server import HttpThread
from rollout_queue.protocol.gateway_messages import SystemStatus
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_async_redis
from rollout_queue.redis.schema_version import claim_schema_async
from rollout_queue.redis.settings import RedisSettings
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.serving import free_port
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.app import create_app
from trainer_service.curves import Curves, limits_of
from trainer_service.groups.guards import Recovery, RecoveryState
from trainer_service.groups.task_rates import TaskRate
from trainer_service.settings import GuardSettings
from trainer_service.shared_state import NotRestorable, SharedState, StatusSnapshot
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep
from weir.__main__ import app
from weir.status import details_from
from weir.top import History, TopSample, lines

Weir = Callable[[str], tuple[int, str]]
SERVER_KEY, TRAINER_KEY = "of-rollout-servers", "of-the-trainer"
ROWS = [
    LedgerStep(step=n, version=n, durable=True, turns=[f"t{n}"], sessions=["s"], tokens=n) for n in (1, 2, 3)
]


STEPS = 5000


@pytest.fixture
def curves(tmp_path: Path) -> Curves:
    """Those of a run of so many steps."""
    path = tmp_path / "metrics.jsonl"
    lines = (json.dumps({"step": n, "version": n, "reward_mean": n / STEPS}) for n in range(1, STEPS + 1))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Curves(path, limits_of(GuardSettings()))


@pytest.fixture
def trainer(gateway: RunningGateway, tmp_path: Path, curves: Curves) -> Iterator[SharedState]:
    """A trainer's REST API at an address that only the trainer's report names."""
    state, port = SharedState(), free_port()
    state.snapshot = StatusSnapshot(step=3, version=3, url=f"http://127.0.0.1:{port}")
    store = PolicyStore(tmp_path / "policies", tmp_path, keep=4)
    api = create_app(
        state,
        lambda since, limit: [row for row in ROWS if row.step > since][:limit],
        store,
        Keyring([CLIENT_KEY], [ADMIN_KEY, TRAINER_KEY], SERVER_KEY),
        CollectorRegistry(),
        curves=curves,
    )
    reported: Any = state.snapshot.report().fields()
    with HttpThread(api, "127.0.0.1", port):
        gateway.redis.hset(key_names.TRAINER, mapping=reported)
        wait_until(lambda: gateway.admin("GET", "/trainer/status").status_code == 200)
        yield state


def test_an_operator_pauses_and_resumes_the_trainer_over_the_gateway(
    gateway: RunningGateway, trainer: SharedState
) -> None:
    assert gateway.post("/admin/trainer/pause").status_code == 403
    assert not trainer.paused
    assert gateway.admin("POST", "/trainer/pause", {}).json() == {"paused": True}
    assert trainer.paused
    assert gateway.admin("POST", "/trainer/resume", {}).json() == {"paused": False}
    assert not trainer.paused


@pytest.mark.parametrize("service_keys", [{}, {"trainer_key": TRAINER_KEY}])
def test_the_gateway_does_not_ask_the_trainer_with_the_key_of_rollout_servers(
    backends: Backends, gateway: RunningGateway, trainer: SharedState, service_keys: dict[str, str]
) -> None:
    """At the trainer, that key opens the files of versions, and no more. The trainer's own opens all, as
    an admin key does."""
    assert gateway.admin("POST", "/trainer/resume", {}).status_code == 200
    with backends.gateway(rollout_server_key=SERVER_KEY, **service_keys) as keyed:
        reply = keyed.admin("POST", "/trainer/pause", {})
        assert (reply.status_code, reply.json()) == (200, {"paused": True})
        assert trainer.paused


def test_an_operator_asks_for_a_checkpoint_over_the_gateway(
    gateway: RunningGateway, trainer: SharedState
) -> None:
    asked = trainer.request_checkpoint  # the trainer's main thread is played here

    def saved_at_once() -> object:
        request = asked()
        trainer.answer_checkpoint_requests(lambda: None)
        return request

    vars(trainer)["request_checkpoint"] = saved_at_once
    reply = gateway.admin("POST", "/trainer/checkpoint", {})
    assert (reply.status_code, reply.json()) == (200, {"step": 3, "version": 3})


def test_a_checkpoint_for_which_the_disk_has_no_room_is_a_503_and_a_warning(
    gateway: RunningGateway, trainer: SharedState
) -> None:
    full = "room on the disk for a checkpoint (No space left on device)"
    trainer.snapshot = replace(trainer.snapshot, state="waiting", waiting_for=full)
    reply = gateway.admin("POST", "/trainer/checkpoint", {})
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")
    assert reply.json()["error"]["message"].endswith(f"the trainer waits for {full}")
    report: Any = trainer.snapshot.report().model_copy(update={"last_seen": time.time()}).fields()
    gateway.redis.hset(key_names.TRAINER, mapping=report)
    assert f"the trainer waits for {full}" in gateway.admin("GET", "/status").json()["warnings"]


def test_an_operator_sets_the_training_back_over_the_gateway(
    gateway: RunningGateway, trainer: SharedState
) -> None:
    ask = trainer.request_rollback  # the trainer's main thread is played here

    def roll_back(version: int) -> None:
        if version != 2:
            raise NotRestorable("no checkpoint has that version")

    def answered_at_once(version: int) -> object:
        request = ask(version)
        trainer.answer_rollback_requests(roll_back)
        return request

    vars(trainer)["request_rollback"] = answered_at_once
    assert gateway.post("/admin/trainer/rollback", {"version": 2}).status_code == 403
    done = gateway.admin("POST", "/trainer/rollback", {"version": 2})
    assert (done.status_code, done.json()) == (200, {"version": 3, "restored": 2, "step": 3})
    refused = gateway.admin("POST", "/trainer/rollback", {"version": 7})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "version")
    assert gateway.admin("POST", "/trainer/rollback", {"version": "2"}).status_code == 400
    listed = gateway.admin("GET", "/trainer/rollback").json()
    assert listed == {"versions": [], "recoveries": [], "lr_scale": 1.0}


def test_a_recovery_is_told_to_everybody_for_an_hour(gateway: RunningGateway, trainer: SharedState) -> None:
    """In the warnings, `weir top`, `weir status` and the curves. Who plays episodes does not hear the reason,
    which may name others' tasks."""
    reason = "the mean reward of the last 32 groups of task secret-1 is 0.1, and was 0.9 at best"
    done = [Recovery(n, 2, 30, reason, automatic=True, at=time.time() - 240) for n in (7, 9)]
    trainer.recovery = RecoveryState(done=done)
    trainer.snapshot = replace(trainer.snapshot, recoveries=done, last_seen=time.time())

    def told() -> tuple[str, str, str, str | None]:
        said: Any = trainer.snapshot.report().fields()
        gateway.redis.hset(key_names.TRAINER, mapping=said)
        status = SystemStatus.read(gateway.admin("GET", "/status").content)
        shown = "\n".join(map(str, lines(History(TopSample(0.0, None)).then(TopSample(0.0, status)), 1000)))
        notice = gateway.get("/v1/models").json()["data"][0].get("notice")
        return "\n".join(status.warnings), shown, details_from(status)["gateway"], notice

    sentence = (
        "the training went back to version 2 4 min ago, 2 times within an hour, after step 30, and goes on "
        "as version 9"
    )
    wait_until(lambda: told()[3] == sentence)
    for place in told()[:3]:
        assert f"{sentence}: {reason}" in place
    curves = gateway.admin("GET", "/learning?metrics=reward_mean").json()
    assert [(each["step"], each["restored"], each["reason"]) for each in curves["recoveries"]] == [
        (30, 2, reason)
    ] * 2
    trainer.snapshot = replace(trainer.snapshot, recoveries=[replaced(each, at=0.0) for each in done])
    wait_until(lambda: told()[3] is None)
    assert not [place for place in told()[:3] if "went back" in place]
    trainer.snapshot = replace(trainer.snapshot, state="paused")
    wait_until(lambda: told()[3] == "the training is paused")


def test_an_operator_reads_the_trainers_status_ledger_and_tasks_over_the_gateway(
    gateway: RunningGateway, trainer: SharedState
) -> None:
    status = gateway.admin("GET", "/trainer/status").json()
    assert (status["state"], status["step"], status["version"]) == ("waiting", 3, 3)
    page = gateway.admin("GET", "/trainer/ledger?since=1&limit=1").json()
    assert ([row["step"] for row in page["data"]], page["next_cursor"]) == ([2], "2")
    refused = gateway.admin("GET", "/trainer/ledger?since=-1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")
    trainer.tasks = [TaskRate(name, passed=2.0, rollouts=2.0) for name in ("c", "a+b", "a+a")]
    assert gateway.get("/admin/trainer/tasks").status_code == 403
    page = gateway.admin("GET", "/trainer/tasks?limit=2").json()
    assert ([row["task_id"] for row in page["data"]], page["next_cursor"]) == (["a+a", "a+b"], "a+b")
    rest = gateway.admin("GET", "/trainer/tasks?cursor=a%2Bb").json()
    assert rest == {"data": [{"task_id": "c", "pass_rate": 0.75, "weight": 0.75}], "next_cursor": None}


@pytest.mark.usefixtures("trainer")
def test_the_curve_of_a_long_run_has_no_more_points_than_buckets(gateway: RunningGateway) -> None:
    def learning(query: str) -> Any:
        return gateway.admin("GET", f"/learning?{query}")

    reply = learning("metrics=reward_mean,none&buckets=100").json()
    series = reply["series"]["reward_mean"]
    assert [len(series[name]) for name in ("steps", "min", "mean", "max")] == [100] * 4
    assert (reply["first"], reply["last"], reply["bucket_steps"], reply["complete"]) == (1, STEPS, 50, True)
    assert series["max"][-1] == 1.0
    assert reply["series"]["none"]["steps"] == []
    assert {limit["metric"]: limit["most"] for limit in reply["limits"]}["mismatch/kl_current"] == 0.2
    near = learning("metrics=reward_mean&from=100&to=109").json()["series"]["reward_mean"]
    assert near["steps"] == list(range(100, 110))
    assert gateway.get("/admin/learning").status_code == 403
    many = ",".join(f"m{n}" for n in range(33))
    for bad in ("buckets=0", "buckets=1001", "from=-1", "to=x", f"metrics={'m' * 2001}", f"metrics={many}"):
        assert learning(bad).status_code == 400, bad
    for bad in ("%22", "loss,a%5C", "%00", "a%1Fb", "%0A", many):
        refused = learning(f"metrics={bad}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metrics"), bad
    odd = learning("metrics=step,%C2%80%7F,%E2%80%A8,%20,%F0%9F%98%80&buckets=1").json()["series"]
    assert odd.pop("step")["max"] == [STEPS]
    assert [series["steps"] for series in odd.values()] == [[]] * 4


@pytest.mark.usefixtures("trainer")
def test_runs_that_are_kept_beside_this_one_are_read_by_operators(
    gateway: RunningGateway, curves: Curves
) -> None:
    assert gateway.admin("GET", "/learning/runs").json() == {"data": [], "next_cursor": None}
    assert curves.path is not None
    kept = curves.path.parent / "older run&1" / "metrics.jsonl"
    kept.parent.mkdir()
    kept.write_text('{"step": 7, "version": 7, "loss": 0.5}\n', encoding="utf-8")
    (run,) = gateway.admin("GET", "/learning/runs").json()["data"]
    assert (run["name"], run["size_bytes"]) == ("older run&1/metrics.jsonl", kept.stat().st_size)
    reply = gateway.admin("GET", "/learning?metrics=loss&run=older+run%261/metrics.jsonl").json()
    assert (reply["series"]["loss"]["mean"], reply["last"], reply["recoveries"]) == ([0.5], 7, [])
    for bad in ("metrics.jsonl", "../metrics.jsonl", "/etc/passwd"):
        refused = gateway.admin("GET", f"/learning?metrics=loss&run={bad}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "run"), bad
    assert gateway.get("/admin/learning/runs").status_code == 403


def test_a_trainer_that_cannot_be_reached_is_said(gateway: RunningGateway) -> None:
    def said() -> str:
        reply = gateway.admin("POST", "/trainer/pause", {})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "trainer_unavailable")
        assert "retry-after" in reply.headers
        return str(reply.json()["error"]["message"])

    assert said() == "no trainer has reported yet"
    curves = gateway.admin("GET", "/learning?metrics=loss")
    assert (curves.status_code, curves.json()["error"]["type"]) == (503, "trainer_unavailable")
    gateway.redis.hset(key_names.TRAINER, mapping={"last_seen": time.time()})
    assert "has not reported its URL" in said()
    url = f"http://127.0.0.1:{free_port()}"
    gateway.redis.hset(key_names.TRAINER, mapping={"url": url})
    assert f"the trainer at {url} does not answer" in said()
    gateway.redis.hset(key_names.TRAINER, mapping={"last_seen": time.time() - 100_000})
    assert "has been silent for 100" in said()  # and a few seconds more


@pytest.mark.parametrize("path", ["/live", "/ready", "/metrics"])
def test_probes_answer_head(gateway: RunningGateway, path: str) -> None:
    reply = gateway.call("HEAD", path, key=None)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.usefixtures("trainer")
def test_the_trainer_reads_the_body_of_a_client_that_offers_http_2(gateway: RunningGateway) -> None:
    url = gateway.redis.hget(key_names.TRAINER, "url").decode()  # type: ignore[union-attr]
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "x-api-key": ADMIN_KEY}
    reply = httpx.post(f"{url}/rollback", json={"version": "x"}, headers=offer, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "version")


@pytest.mark.usefixtures("trainer")
def test_the_trainers_probes_answer_head(gateway: RunningGateway) -> None:
    url = gateway.redis.hget(key_names.TRAINER, "url").decode()  # type: ignore[union-attr]
    assert httpx.head(f"{url}/live", timeout=300).status_code == 200
    assert httpx.head(f"{url}/ready", timeout=300).status_code == 503


def test_the_default_keys_are_a_warning(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(client_keys=["dev-client-key"], admin_keys=["dev-admin-key"]) as gateway:
        warnings = gateway.get("/admin/status", key="dev-admin-key").json()["warnings"]
    assert (
        "everybody knows the keys dev-client-key, dev-admin-key: set WEIR_CLIENT_KEYS and WEIR_ADMIN_KEYS"
        in warnings
    )


def test_an_empty_redis_is_a_warning_while_the_gateway_notices_it(
    own_backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that writes the secret again may come while the warnings are collected."""
    collect = LostKeys.warnings

    async def before_a_poll(lost_keys: LostKeys) -> list[str]:
        warnings = await collect(lost_keys)
        await lost_keys.refresh()
        return warnings

    own_backends.clear(None)
    monkeypatch.setattr(LostKeys, "warnings", before_a_poll)
    with own_backends.gateway() as gateway:
        assert not lost(gateway)
        own_backends.redis.flushdb()
        assert EMPTIED in lost(gateway)
        wait_until(lambda: bool(own_backends.redis.exists(key_names.SECRET)))
    with own_backends.gateway() as gateway:  # one that starts on the empty Redis
        assert EMPTIED in lost(gateway), "for a day"
        own_backends.redis.delete(key_names.LOSSES)
        assert not lost(gateway)
        seen: Any = {"step": 151, "version": 151, "last_seen": time.time(), "rollouts_owed": 4}
        gateway.redis.hset(key_names.TRAINER, mapping=seen)
        assert not lost(gateway), "the first checkpoint is still to come"
        gateway.redis.hset(key_names.TRAINER, mapping={"rollouts_owed": 0})
        assert "at step 151, but Redis knows of no session that ever ended" in lost(gateway)
        gateway.redis.hincrby(key_names.VERDICTS, "session:trained")
        assert not lost(gateway)
        own_backends.redis.set(key_names.SECRET, "another gateway's")
        assert "restart the gateways" in lost(gateway)


@contextmanager
def losing(redis_url: str, left: list[int], kept: Callable[[Redis], object]) -> Iterator[AsyncRedis]:
    """A client before whose command number `left` Redis loses everything, but for what `kept` writes."""
    own = redis_url.removesuffix("0") + "6"

    class Losing(Connection):
        async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                redis.flushdb()
                kept(redis)
            await super().send_packed_command(*arguments, **options)

    with closing(redis_at(own)) as redis:
        redis.flushdb()
        redis.set(key_names.SECRET, b"secret")
        yield async_redis_at(own, connection_class=Losing)


@pytest.mark.parametrize("lost", [None, key_names.SCHEMA, key_names.SECRET])
@pytest.mark.parametrize("command", range(1, 7))
async def test_an_empty_redis_is_noticed_between_any_two_commands_of_a_poll(
    redis_url: str, lost: key_names.Key | None, command: int
) -> None:
    """Also while the gateway notices that one key is gone."""
    left = [0]
    with losing(redis_url, left, lambda _: None) as client:
        lost_keys = LostKeys(client, b"secret", ())
        await claim_schema_async(client)
        if lost is not None:
            await lost_keys.refresh()
            await client.delete(lost)
        left[0] = command
        for _ in range(4):
            await lost_keys.refresh()
        assert EMPTIED in await lost_keys.warnings()
        await client.aclose()
    assert left[0] <= 0, "it was emptied"


async def test_servers_are_written_again_though_another_gateway_has_healed_the_rest(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "WHOLE_EVERY_S", 0.0)
    left, server = [0], Registration(id="r0", url="http://r0", engine_url="http://r0:1")
    with losing(redis_url, left, lambda redis: redis.set(key_names.SECRET, b"secret")) as client:
        known = registrations.KnownRegistrations()
        await registrations.write_registration(client, server)
        await LostKeys(client, b"secret", ()).refresh()
        for left[0] in (0, 2):  # after the first command, Redis is emptied
            read = await known.read(client, ServingPlan(), ())
            assert read.registrations.keys() == {"r0"}
        assert await client.hexists(key_names.SERVERS, "r0")
        await client.aclose()
    assert left[0] <= 0, "it was emptied"


@pytest.mark.parametrize("prefix", ["weir", "another"])
async def test_servers_that_alone_are_lost_are_written_again(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrations, "WHOLE_EVERY_S", 0.0)
    settings = RedisSettings(redis_url=redis_url.removesuffix("0") + "6", redis_key_prefix=prefix)
    async with open_async_redis(settings, timeout_s=PATIENCE_S) as client:
        await client.flushdb()
        known = registrations.KnownRegistrations()
        server = Registration(id="r0", url="http://r0", engine_url="http://r0:1")
        await registrations.write_registration(client, server)
        await client.set(key_names.SECRET, b"secret")
        await LostKeys(client, b"secret", ()).refresh()
        for _ in range(2):
            assert (await known.read(client, ServingPlan(), ())).registrations.keys() == {"r0"}
            await client.delete(key_names.SERVERS)


@pytest.fixture
def weir(
    gateway: RunningGateway, backends: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Weir:
    """Runs a command of the command line as in a container: only the services' own variables are set."""
    monkeypatch.chdir(tmp_path)
    variables = {
        "WEIR_REDIS_URL": backends.redis_url,
        "WEIR_GATEWAY_URL": gateway.url,
        "WEIR_ADMIN_KEYS": ADMIN_KEY,
        "COLUMNS": "240",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def run(command: str) -> tuple[int, str]:
        ended = CliRunner().invoke(app, [command])
        return ended.exit_code, ended.output

    return run


def test_weir_status_shows_services_that_it_has_not_started(
    gateway: RunningGateway, trainer: SharedState, weir: Weir
) -> None:
    code, said = weir("status")
    assert code == 0, said
    assert all(name in said for name in ("redis", "gateway", "engine-0", "trainer_service")), said
    assert f"{trainer.snapshot.url}" in said
    gateway.redis.hset(key_names.TRAINER, mapping={"last_seen": time.time() - 1000})
    code, said = weir("status")
    assert (code, "down" in said) == (1, True)


def test_weir_audit_reads_the_redis_and_the_trainer_of_the_services(trainer: SharedState, weir: Weir) -> None:
    trainer.ready = True
    code, said = weir("audit")
    assert "ledger: 3 durable steps, 3 turns, 6 tokens" in said
    assert code == 1
    assert "Redis has no trace of the steps 1 to 3" in said
    assert "found 1 unexplained; each was found in 3 readings" in said


def lost(gateway: RunningGateway) -> str:
    warnings = gateway.admin("GET", "/status").json()["warnings"]
    return " ".join(warning for warning in warnings if "lost its data" in warning)
