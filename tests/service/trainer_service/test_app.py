"""The process of a trainer: its REST API with its keys, and how it claims and loses its lease."""

import gzip
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from threading import Event, Thread, Timer

import httpx
import msgspec
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from redis import Redis

from rollout_queue.contract.errors import LeaseLost
from rollout_queue.contract.published_policy import STABLE
from rollout_queue.http.callers import Keyring
from rollout_queue.http.http_server import HttpThread
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Holder, Lease
from tests.support.redis_clients import redis_at
from tests.support.serving import free_port
from tests.support.trainer_service.harness import MakeHarness
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from trainer_service.app import create_app
from trainer_service.heartbeat import keep_lease
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_state import LedgerStep

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def shared_state() -> SharedState:
    return SharedState()


@pytest.fixture
def client(tmp_path: Path, shared_state: SharedState) -> TestClient:
    store = PolicyStore(tmp_path / "policies", tmp_path, keep=4)
    for version in (1, 2):
        store.path_of(version).mkdir()
        (store.path_of(version) / "manifest.json").write_text("{}", encoding="utf-8")
    (store.path_of(1) / STABLE).touch()
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (store.path_of(1) / "link").symlink_to(tmp_path / "secret")
    rows = [
        LedgerStep(step=s, version=s, durable=True, turns=[f"t{s}"], sessions=["s"], tokens=s)
        for s in (1, 2, 3)
    ]

    def ledger(since: int, limit: int) -> list[LedgerStep]:
        return [row for row in rows if row.step > since][:limit]

    return TestClient(
        create_app(shared_state, ledger, store, Keyring(["client"], ["admin"], "server"), CollectorRegistry())
    )


@pytest.mark.parametrize("path", ["/status", "/ledger", "/tasks", "/weights", "/weights/1/manifest.json"])
def test_every_path_but_the_probes_needs_the_admin_key(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"x-api-key": "client"}).status_code == 403
    assert client.get(path, headers=ADMIN).status_code == 200
    assert client.get("/live").status_code == client.get("/metrics").status_code == 200
    for name in ("pause", "resume", "checkpoint"):
        assert client.post(f"/{name}").status_code == 401


def test_the_key_of_rollout_servers_reads_weights_and_nothing_else(client: TestClient) -> None:
    key = {"authorization": "Bearer server"}
    for path in ("/weights", "/weights/1/manifest.json"):
        assert client.get(path, headers=key).status_code == 200
    for path in ("/status", "/ledger", "/tasks"):
        assert client.get(path, headers=key).status_code == 403
    for name in ("pause", "resume", "checkpoint", "rollback"):
        assert client.post(f"/{name}", headers=key).status_code == 403


def test_the_disk_use_of_versions_is_shown(client: TestClient) -> None:
    page = client.get("/weights", headers=ADMIN).json()
    assert page["data"] == [{"version": 1, "size_bytes": len("{}") + len("secret")}]
    assert page["free_bytes"] > 0
    metrics = dict(line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(metrics["weir_trainer_policies_bytes"]) == 8
    assert float(metrics["weir_trainer_disk_free_bytes"]) > 0


def test_the_api_and_the_main_thread_tell_each_other(client: TestClient, shared_state: SharedState) -> None:
    assert client.get("/ready").status_code == 503
    shared_state.ready = True
    assert client.get("/ready").status_code == 200
    body = client.get("/status", headers=ADMIN).json()
    assert set(body) == {"state", "step", "version", "waiting_for", "metrics", "model_checks"}
    client.post("/pause", headers=ADMIN)
    assert shared_state.paused
    client.post("/resume", headers=ADMIN)
    assert not shared_state.paused


@pytest.mark.parametrize(
    "path",
    ["/weights/2/manifest.json", "/weights/1/link", "/weights/1/..%2F..%2Fsecret", "/weights/1/none",
     "/weights/1/.", "/weights/1/%2e%2e", "/weights/9/manifest.json"],
)  # fmt: skip
def test_only_the_files_of_finished_versions_are_served(client: TestClient, path: str) -> None:
    reply = client.get(path, headers=ADMIN)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"


def test_a_body_is_decoded_within_its_bound(client: TestClient) -> None:
    def refused(content: bytes, coding: str) -> tuple[int, str | None]:
        headers = ADMIN | {"content-type": "application/json", "content-encoding": coding}
        reply = client.post("/rollback", content=content, headers=headers)
        return reply.status_code, reply.json()["error"]["param"]

    body = b'{"version": "x"}'
    for coding in ("gzip", "Identity, GZIP"):
        assert refused(gzip.compress(body), coding) == (400, "version")
    assert refused(gzip.compress(body)[:-1], "gzip") == (400, None)
    assert refused(gzip.compress(bytes(2**21)), "gzip") == refused(bytes(2**21), "identity") == (413, None)
    assert refused(body, "br") == (415, None)


def test_a_version_that_is_just_removed_is_not_found(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyStore, "versions", lambda _: [1, 9])
    assert client.get("/weights/9/manifest.json", headers=ADMIN).status_code == 404


def test_the_ledger_is_read_in_pages(client: TestClient) -> None:
    page = client.get("/ledger?since=0&limit=2", headers=ADMIN).json()
    assert ([row["step"] for row in page["data"]], page["next_cursor"]) == ([1, 2], "2")
    rest = client.get(f"/ledger?since={page['next_cursor']}", headers=ADMIN).json()
    assert ([row["step"] for row in rest["data"]], rest["next_cursor"]) == ([3], None)
    assert rest["data"][0] == {
        "step": 3, "version": 3, "durable": True, "turns": ["t3"], "sessions": ["s"], "tokens": 3
    }  # fmt: skip


def listens(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def test_heads_are_bounded(client: TestClient) -> None:
    """Bodies are bounded by the application, all else by the server."""
    port = free_port()
    head = {"host": "trainer:8200", "x": "y" * 70_000}
    with HttpThread(client.app, "127.0.0.1", port):
        wait_until(lambda: listens(port))
        assert httpx.get(f"http://127.0.0.1:{port}/live", headers=head, timeout=120).status_code == 431


RETRY_S = 0.01


def leave_a_lease(redis: Redis, lease_s: float) -> None:
    """Claim a lease and never renew it, like a trainer that crashed on another machine."""
    holder = msgspec.structs.replace(Holder.here(), host="far", pid=7, place="another boot")
    redis.set(key_names.LEASE, msgspec.json.encode(holder), px=int(lease_s * 1000))


def test_a_lease_is_renewed_as_long_as_it_is_held_and_then_released(
    turned: TurnedClock, redis: Redis
) -> None:
    def is_renewed() -> bool:
        turned.turn(200)
        return redis.pttl(key_names.LEASE) > 500_000

    with keep_lease(Lease(redis, 600.0), SharedState(), RETRY_S) as held:
        assert held
        for _ in range(4):
            redis.pexpire(key_names.LEASE, 300_000)  # as if half of its time had passed
            wait_until(is_renewed)
    assert not redis.exists(key_names.LEASE)


def test_a_trainer_waits_until_the_lease_of_a_crashed_one_expires(
    turned: TurnedClock, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)

    def expire() -> None:
        wait_until(lambda: f"{key_names.LEASE} belongs to far:7, since 20" in caplog.text)
        redis.delete(key_names.LEASE)
        turned.turn(1000)

    with ThreadPoolExecutor(1) as threads:
        expiry = threads.submit(expire)
        with keep_lease(Lease(redis, 30.0), SharedState(), RETRY_S) as held:
            assert held
        expiry.result()
    assert re.search(r"unless renewed, it expires in (1000\.0|9\d\d\.\d) s", caplog.text)


def test_a_trainer_ends_if_another_one_renews_the_lease(
    turned: TurnedClock, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)

    def renew() -> None:
        wait_until(lambda: key_names.LEASE in caplog.text)
        redis.pexpire(key_names.LEASE, 1_000_000)
        turned.turn(300)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(renew)
        with pytest.raises(SystemExit) as refused, keep_lease(Lease(redis, 30.0), SharedState(), RETRY_S):
            pass
        other.result()
    assert str(refused.value).startswith("another trainer holds weir:trainer_lease: far:7, since 20")
    assert "\n" not in str(refused.value)


def test_of_two_trainers_that_wait_for_a_lease_one_ends(
    turned: TurnedClock, redis: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_lease(redis, 1000.0)
    ends: list[object] = []
    refused = Event()

    def begin() -> None:
        with suppress(SystemExit):
            with redis_at(redis_url) as own, keep_lease(Lease(own, 300.0), SharedState(), RETRY_S) as held:
                ends.append(held)
                assert refused.wait(300)
            return
        ends.append("refused")
        refused.set()

    def one_is_refused() -> bool:
        turned.turn(100)
        return refused.is_set()

    both = [Thread(target=copy_context().run, args=(begin,)) for _ in range(2)]
    for each in both:
        each.start()
    wait_until(lambda: caplog.text.count("unless renewed") == 2)
    redis.delete(key_names.LEASE)
    wait_until(one_is_refused)
    for each in both:
        each.join()
    assert sorted(map(str, ends)) == ["True", "refused"]


@pytest.mark.parametrize("is_away", [False, True], ids=["another holds it", "Redis is away"])
def test_a_trainer_that_waits_for_a_lease_can_be_stopped(redis: Redis, is_away: bool) -> None:
    leave_a_lease(redis, 1000.0)
    shared_state = SharedState()
    waiting = Timer(0.2, shared_state.stop)
    waiting.start()
    with (
        Redis.from_url("redis://127.0.0.1:1/0") as nobody,
        keep_lease(Lease(nobody if is_away else redis, 30.0), shared_state, RETRY_S) as held,
    ):
        assert not held
    waiting.join()
    assert redis.exists(key_names.LEASE)


@pytest.mark.parametrize("moment", ["checkpoint", "its end", "publish"])
def test_a_trainer_that_lost_its_lease_neither_saves_nor_publishes(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another trainer claims the lease during the step."""
    harness = make_harness().start()
    harness.agents.group("g", [1.0, 0.0])
    moments, confirm = iter(["checkpoint", "its end", "publish"]), harness.heartbeat.confirm

    def slept() -> None:
        harness.stream.taken_over = next(moments) == moment
        confirm()

    monkeypatch.setattr(harness.heartbeat, "confirm", slept)
    with pytest.raises(LeaseLost):
        harness.trainer.run()
    assert (harness.settings.checkpoint_dir / "CURRENT").exists() is (moment == "publish")
    assert not harness.gateway.announced
    durable = moment == "publish"
    assert set(harness.session_codes().values()) == {"trained" if durable else None}


def test_a_paused_trainer_notices_that_it_lost_its_lease(make_harness: MakeHarness) -> None:
    harness = make_harness().start()
    harness.shared_state.pause()
    harness.stream.taken_over = True
    with pytest.raises(LeaseLost):
        harness.trainer.run()
