"""Gateways whose Redis ends, does not answer for a while, fails over, or has another deployment, too."""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.policies.push import PushDriver
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from tests.support.gateway.calls import Call
from tests.support.gateway.deployment import Deploy, gateway_thread, ready, traffic
from tests.support.gateway.gated_engine import GatedEngine, asked, let_on
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.queue.servers import WatchedMaster
from tests.support.redis_process import RedisProcess
from tests.support.serving import NOBODY, free_port, serving
from tests.support.waiting import wait_until
from weir.audit.audit import audit
from weir.audit.audit_sources import Sources


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start()
    yield process
    process.process.send_signal(signal.SIGCONT)
    process.close()


@pytest.fixture
def alone(redis: RedisProcess, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[RunningGateway]:
    """A gateway with a Redis of its own."""
    backends = Backends(redis.url, tiny_model, tokenizer, redis.client, GatedEngine(tokenizer))
    with serving(backends) as backends.engine_url, backends.ready_gateway() as running:
        yield running


def warnings_of(gateway: RunningGateway) -> list[str]:
    found: list[str] = gateway.get("/admin/status", key=ADMIN_KEY).json()["warnings"]
    return found


def gauge(gateway: RunningGateway, name: str) -> str | None:
    """The value of a series, as Prometheus reads it."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", gateway.get("/metrics").text, re.M)
    return found[1] if found else None


def test_the_state_at_the_last_poll_is_shown_and_a_redis_that_ends(
    alone: RunningGateway, redis: RedisProcess
) -> None:
    """Without Redis, no engine works for a call that cannot be stored."""
    wait_until(lambda: gauge(alone, "weir_redis_up") == "1.0")
    assert gauge(alone, "weir_trainer_seen_timestamp_seconds") == "NaN"
    assert gauge(alone, 'weir_trainer_state{state="waiting"}') == "0.0"
    assert alone.chat("first").status_code == 200
    waiting: Any = {"rollouts_waiting": 7, "rollouts_owed": 2, "rollouts_per_step": 4.0}
    report = TrainerReport(state="waiting", version=3, last_seen=1e9, **waiting)
    fields: Any = report.fields()
    redis.client.hset(key_names.TRAINER, mapping=fields)
    redis.client.xadd(key_names.DEAD_LETTERS, {"error": "unreadable"})
    shown = {
        "weir_rollouts_waiting": "7.0",
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
    wait_until(lambda: {name: gauge(alone, name) for name in shown} == shown)
    redis.terminate()
    wait_until(lambda: gauge(alone, "weir_redis_up") == "0.0")
    unready = alone.get("/ready")
    assert unready.json()["error"]["type"] == "storage_unavailable"
    assert "Redis does not answer" in unready.json()["error"]["message"]
    assert gauge(alone, "weir_rollouts_waiting") == "7.0"
    alone.engine.requests.clear()
    for stream in (False, True):
        reply = alone.chat("second", stream=stream)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")
    assert alone.engine.requests == []


def test_that_pushes_wait_for_redis_is_said_once(
    alone: RunningGateway,
    redis: RedisProcess,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, step = list[bool](), PushDriver.step

    async def counted(driver: PushDriver) -> None:
        await step(driver)
        steps.append("pushes wait for Redis" in caplog.text)

    monkeypatch.setattr(PushDriver, "step", counted)
    for times in (1, 2):
        redis.terminate()
        wait_until(lambda times=times: caplog.text.count("pushes wait for Redis") >= times)  # type: ignore[misc]
        begun = len(steps)
        wait_until(lambda begun=begun: len(steps) >= begun + 3)  # type: ignore[misc]
        assert caplog.text.count("pushes wait for Redis") == times
        redis.start()
        wait_until(lambda: gauge(alone, "weir_redis_up") == "1.0")
        begun = len(steps)
        wait_until(lambda begun=begun: len(steps) >= begun + 2)  # type: ignore[misc]


def test_a_redis_that_evicts_is_a_warning_before_and_after_and_a_metric(
    alone: RunningGateway, redis: RedisProcess
) -> None:
    redis.client.config_set("maxmemory-policy", "allkeys-random")
    wait_until(lambda: gauge(alone, "weir_redis_evicts") == "1.0")
    assert any("its maxmemory-policy is allkeys-random" in each for each in warnings_of(alone))
    assert gauge(alone, "weir_redis_evicted_keys") == "0.0"
    for number in range(50):
        redis.client.setrange(f"other-{number}", 100_000, b"x")
    used: Any = redis.client.info("memory")
    redis.client.config_set("maxmemory", used["used_memory"] - 1_000_000)
    wait_until(lambda: float(gauge(alone, "weir_redis_evicted_keys") or 0) > 0)
    assert any("keys since it started: set its maxmemory-policy" in each for each in warnings_of(alone))


def test_a_redis_that_is_full_is_told_by_the_probe_and_as_a_warning(
    alone: RunningGateway, redis: RedisProcess
) -> None:
    redis.client.setrange("ballast", 20 * 2**20, b"x")
    redis.client.config_set("maxmemory", 10 * 2**20)
    wait_until(lambda: alone.get("/ready").status_code == 503)
    told = alone.get("/ready").json()["error"]
    assert told["type"] == "storage_unavailable"
    assert "Redis is full" in told["message"]
    in_warnings = {re.sub(r"\d+%", "N%", each) for each in warnings_of(alone)}  # the memory used has moved on
    assert re.sub(r"\d+%", "N%", told["message"]) in in_warnings
    redis.client.delete("ballast")
    wait_until(lambda: alone.get("/ready").status_code == 200)


def test_the_last_writes_that_redis_has_lost_are_a_warning(
    alone: RunningGateway, redis: RedisProcess
) -> None:
    """A power cut has taken the end of the file."""
    kept, lost = alone.session(), alone.session()
    assert alone.chat(key=kept["api_key"]).status_code == 200
    before = redis.written
    assert alone.chat(key=lost["api_key"]).status_code == 200
    redis.kill()
    redis.cut(to=before)
    redis.start()
    assert alone.chat("meanwhile").status_code in (200, 503)
    wait_until(lambda: any("without its last writes" in each for each in warnings_of(alone)))
    (said,) = {each for each in warnings_of(alone) if "without its last writes" in each}
    assert f"lack 1 records that clients were told are stored, of session {lost['session_id']};" in said


def test_a_turn_whose_client_was_told_that_it_failed_is_not_trained(
    alone: RunningGateway, redis: RedisProcess
) -> None:
    session = alone.session()
    alone.chat(session=session)  # the gateway's connection to Redis is open from here on
    alone.engine.stall_after = 0  # the call has looked its session up when Redis stops
    with ThreadPoolExecutor(1) as pool:
        call = Call(alone, session, stream=False)
        answer = pool.submit(call.answer)
        asked(alone, 2)
        redis.process.send_signal(signal.SIGSTOP)
        let_on(alone)
        status, body = answer.result()
    assert (status, b"storage_unavailable" in body) == (503, True)
    redis.process.send_signal(signal.SIGCONT)
    wait_until(lambda: alone.get("/ready").status_code == 200)
    again = alone.chat(session=session).headers["x-weir-turn-id"]
    finish = f"/sessions/{session['session_id']}/finish"
    wait_until(lambda: alone.post(finish, {"status": "completed", "reward": 1}).status_code == 200)
    ready = [turn["turn_id"] for turn in alone.turns(session) if turn["verdict"]["code"] == "ready"]
    assert ready[1:] == [again]
    assert len(ready) == 2


def test_the_fleet_serves_on_what_it_served_when_redis_is_emptied(deploy: Deploy) -> None:
    """Calls go on, a drained server stays drained, and the next version is served."""
    deployment = deploy(2)
    gateway, redis = deployment.gateway, deployment.gateway.redis
    deployment.announce(1)
    deployment.until("serving")
    assert gateway.admin("POST", "/rollout_servers/r1/drain").status_code == 200
    with traffic(gateway, per_s=20.0) as seen:
        wait_until(lambda: len(seen.heard) > 3)
        redis.flushdb()
        wait_until(
            lambda: redis.exists(key_names.SECRET, key_names.SERVERS, key_names.SERVING, key_names.HELD) == 4
        )
        before = len(seen.heard)
        wait_until(lambda: len(seen.heard) > before + 5)
    assert set(seen.statuses) <= {200, 404, 409}, "a call in flight has lost its session"
    assert deployment.plan()["serving"] == 1
    listed = gateway.admin("GET", "/rollout_servers").json()["data"]
    assert {each["id"]: each["state"] for each in listed} == {"r0": "ready", "r1": "draining"}
    deployment.announce(2)
    wait_until(lambda: deployment.plan()["serving"] == 2)
    assert gateway.chat().status_code == 200


@pytest.mark.parametrize("gateway", ["stays", "starts again"])
def test_a_failover_that_lost_the_plan_costs_no_call(
    deploy: Deploy, own_backends: Backends, gateway: str
) -> None:
    """Redis has the plan and the register of version 1 again, as a replica that lagged; servers serve 2."""
    planned = (key_names.SERVING, key_names.POLICIES, key_names.RESERVED, key_names.SERVER_PUSHES)
    own_backends.clear(None)
    redis, port = own_backends.redis, free_port()
    with ExitStack() as stack:
        served, first = stack.enter_context(gateway_thread(own_backends, port))
        deployment = deploy(2, gateway=first, server={"settle_s": 0.5})
        deployment.announce(1)
        deployment.until("serving")
        lagged = {key: redis.dump(key) for key in planned}
        deployment.announce(2)
        wait_until(lambda: deployment.plan()["push"]["version"] == 2)
        deployment.until("serving")
        if gateway == "starts again":
            served.end()
            served.join()
        with redis.pipeline(transaction=True) as failover:
            failover.delete(*planned)
            for key, value in lagged.items():
                if value is not None:
                    failover.restore(key, 0, value)
            failover.execute()
        if gateway == "starts again":
            _, deployment.gateway = stack.enter_context(gateway_thread(own_backends, port))
            wait_until(lambda: ready(deployment.gateway) == 2)
        with traffic(deployment.gateway, per_s=20.0) as seen:
            wait_until(lambda: len(seen.heard) > 40)
            assert deployment.versions() == [2, 2], "no server loads the older version"
            if gateway == "stays":
                wait_until(
                    lambda: deployment.plan()["serving"] == 2 and redis.hexists(key_names.POLICIES, "2")
                )
            deployment.announce(3 if gateway == "stays" else 2)
            wait_until(lambda: deployment.plan()["push"]["version"] > 1)
            deployment.until("serving")
        assert set(seen.statuses) == {200}


def test_without_its_replicas_nothing_is_promised_of_versions_and_keys(own_backends: Backends) -> None:
    """What a failover may lose is told to nobody as stored."""
    own_backends.clear(None)
    with own_backends.gateway(redis_wait_replicas=1, redis_wait_timeout_s=0.1) as gateway:
        asked: dict[str, Any] = {
            "/policies?wait=false": {"location": "file:///policies/1"},
            "/keys": {"name": "team", "role": "client"},
            "/adapters?wait=false": {"name": "a", "location": "file:///a", "manifest_sha256": 64 * "a"},
            "/policies/hold": {"reason": "no"},
        }
        for path, body in asked.items():
            reply = gateway.admin("POST", path, body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable"), path
            assert "0 of 1 replicas" in reply.json()["error"]["message"]


@pytest.mark.failover
def test_clients_get_answers_that_stay_or_a_503(backends: Backends, tmp_path: Path) -> None:
    with closing(WatchedMaster(tmp_path / "servers")) as watched:
        watched.master.client.hset(key_names.POLICIES, "0", "{}")
        settings = {"redis_url": watched.url, "redis_wait_replicas": 2, "redis_wait_timeout_s": 3.0}
        with backends.gateway(**settings) as gateway:
            with traffic(gateway, per_s=20.0) as seen:
                wait_until(lambda: len(seen.heard) > 4)
                master = watched.master
                master.kill()
                watched.fail_over(master)
                wait_until(lambda: gateway.chat().status_code == 200)
            assert set(seen.statuses) <= {200, 503}
        (tmp_path / "none").mkdir()
        sources = Sources(watched.url, NOBODY, checkpoint_dir=tmp_path / "none")
        assert audit(sources, seen.heard, readings=1).findings == ()


def test_deployments_with_two_prefixes_share_a_redis(gateway: RunningGateway, backends: Backends) -> None:
    before = set(backends.redis.scan_iter())
    with backends.gateway(redis_key_prefix="other") as other:
        session = other.session(group_id="g", user="u")
        key = session["api_key"]
        assert other.chat("hi", session=session, key=key).status_code == 200
        path = f"/sessions/{session['session_id']}/v1/responses"
        assert other.post(path, {"input": "hi", "store": True}, key=key).status_code == 200
        other.finish(session, reward=1.0)
        assert other.admin("GET", "/pipeline").status_code == 200
        assert gateway.get(f"/sessions/{session['session_id']}").status_code == 404
        new = set(backends.redis.scan_iter()) - before
    assert {each for each in new if not each.startswith(b"weir:")} >= {b"other:stream", b"other:sessions"}
    assert not any(session["session_id"].encode() in each for each in new if each.startswith(b"weir:"))
    backends.redis.delete(*(each for each in new if each.startswith(b"other:")))
