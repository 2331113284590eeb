"""The REST API: the trainer's status, its weights and ledger, and the keys that it needs."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from rollout_queue.contract.policies.policy import STABLE
from rollout_queue.http.keys import Keyring
from trainer_service.app import create_app
from trainer_service.status.shared_state import SharedState
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


def test_the_trainer_is_ready_when_the_main_thread_says_so(
    client: TestClient, shared_state: SharedState
) -> None:
    assert client.get("/ready").status_code == 503
    shared_state.ready = True
    assert client.get("/ready").status_code == 200


def test_status_has_the_fields_of_the_contract(client: TestClient) -> None:
    body = client.get("/status", headers=ADMIN).json()
    assert set(body) == {"state", "step", "version", "waiting_for", "metrics"}


def test_pause_and_resume_reach_the_main_thread(client: TestClient, shared_state: SharedState) -> None:
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


def test_a_version_removed_while_it_is_asked_for_is_not_found(
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
