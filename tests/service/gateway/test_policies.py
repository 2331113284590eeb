"""Publishing a policy: version numbers, the push to each server, and which servers stay in rotation."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from rollout_queue.redis import keys
from rollout_queue.redis.policies.register import KnownPolicies, PolicyRegister
from tests.support.claimed import claimed_reader
from tests.support.gateway.fake_rollout_server import Endpoint, FakeRolloutServer
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway
from tests.support.serving import serving
from tests.support.trainer_service.publications import InlineExecutor, OneTensor
from tests.support.waiting import wait_until
from trainer_service.metrics import TrainerMetrics
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace
from trainer_service.publishing.publisher import Publisher
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore


@pytest.fixture(scope="module")
def fleet_url(own_backends: Backends) -> Iterator[tuple[str, bytes]]:
    """A gateway without engines in its configuration, and its secret."""
    own_backends.clear(None)
    with own_backends.gateway_url(engines=[]) as url:
        yield url, bytes(own_backends.redis.get(keys.SECRET) or b"")  # type: ignore[arg-type]


@pytest.fixture
def gateway(own_backends: Backends, fleet_url: tuple[str, bytes]) -> Iterator[RunningGateway]:
    url, secret = fleet_url
    own_backends.clear(secret)
    with httpx.Client(timeout=120) as http:
        gateway = RunningGateway(url, own_backends.engine, own_backends.redis, http)
        wait_until(lambda: status_of(gateway)["rollout_servers"] == [])
        wait_until(lambda: status_of(gateway)["policy"]["serving"] is None)
        yield gateway


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[tuple[str, Endpoint]]]:
    """Two server addresses that all tests share; each test puts fresh fake servers behind them."""
    endpoints = [Endpoint(), Endpoint()]
    with serving(endpoints[0]) as one, serving(endpoints[1]) as two:
        yield list(zip((one, two), endpoints, strict=True))


@pytest.fixture
def servers(
    gateway: RunningGateway, own_backends: Backends, endpoints: list[tuple[str, Endpoint]]
) -> list[FakeRolloutServer]:
    for index, (url, actor) in enumerate(endpoints):
        actor.part = FakeRolloutServer()
        register(gateway, f"r{index}", url, own_backends.engine_url)
    return [actor.part for _, actor in endpoints]


def register(gateway: RunningGateway, server_id: str, url: str, engine_url: str) -> Any:
    body = {"id": server_id, "url": url, "engine_url": engine_url}
    reply = gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()


def status_of(gateway: RunningGateway) -> Any:
    return gateway.get("/admin/status", key=ADMIN_KEY).json()


def engines_of_sessions(gateway: RunningGateway, count: int) -> list[str]:
    """The servers that answered one call of each of `count` new sessions."""
    engines = []
    for _ in range(count):
        session = gateway.session()
        gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
        engines += [turn["engine"] for turn in gateway.turns(session)]
    return engines


def publish(gateway: RunningGateway, version: int | None, **fields: Any) -> Any:
    """`force` allows numbers that are not the next one."""
    body = {"version": version, "location": f"file:///policies/{version}", "force": True, **fields}
    return gateway.post("/admin/policies", body, key=ADMIN_KEY)


def test_registration_makes_the_first_version_known(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    (record,) = gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]
    assert (record["version"], record["state"], record["location"]) == (0, "serving", None)
    assert servers[0].keys == {f"Bearer {ADMIN_KEY}"}


def test_a_push_reaches_every_server_and_reports_each(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    reply = publish(gateway, 3, manifest_sha256=64 * "a", step=9)
    assert reply.status_code == 200
    assert [(r["server"], r["ok"], r["version_served"]) for r in reply.json()["results"]] == [
        ("r0", True, 3),
        ("r1", True, 3),
    ]
    prepared, loaded = servers[1].reloads
    assert (prepared.pop("prepare"), loaded.pop("prepare")) == (True, False)
    assert prepared == loaded
    assert loaded.pop("push") == reply.json()["push"]["id"]
    assert loaded == {
        "version": 3,
        "location": "file:///policies/3",
        "manifest_sha256": 64 * "a",
        "force": False,
        "peer": None,
    }
    assert gateway.get("/admin/status", key=ADMIN_KEY).json()["policy"]["serving"] == 3


def test_one_failure_is_207_and_the_failed_server_goes_on_with_the_version_before(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    servers[0].refuse = True
    reply = publish(gateway, 3)
    assert reply.status_code == 207
    assert reply.json()["results"][0]["error"] == "a tensor is missing"
    assert status_of(gateway)["policy"]["admissible"] == [3, 0]
    wait_until(lambda: [s["state"] for s in status_of(gateway)["rollout_servers"]] == ["ready", "ready"])
    assert set(engines_of_sessions(gateway, 12)) == {"r0", "r1"}


def test_a_server_too_many_versions_behind_gets_no_calls(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    servers[0].refuse = True
    for version in range(1, 6):
        assert publish(gateway, version).status_code == 207
    assert status_of(gateway)["policy"]["admissible"] == [5, 4, 3, 2, 1]
    assert set(engines_of_sessions(gateway, 8)) == {"r1"}


def test_when_all_fail_the_old_version_is_served_on(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    for server in servers:
        server.refuse = True
    assert publish(gateway, 3).status_code == 207
    assert gateway.get("/admin/status", key=ADMIN_KEY).json()["policy"]["serving"] == 0
    assert gateway.chat().status_code == 200


def test_a_slow_server_does_not_keep_the_others_out_of_rotation(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    servers[1].slow = True
    with ThreadPoolExecutor() as pool:
        push = pool.submit(publish, gateway, 3)
        try:
            wait_until(lambda: status_of(gateway)["policy"]["serving"] == 3)
            assert status_of(gateway)["policy"]["admissible"] == [3, 0]
            assert set(engines_of_sessions(gateway, 12)) == {"r0", "r1"}
        finally:
            servers[1].slow = False
        assert push.result().status_code == 200


@pytest.mark.parametrize("nonsense", [[], {}, "yes", {"ok": True}, {"ok": True, "version": 2}])
def test_a_server_that_does_not_prove_the_version_failed(
    gateway: RunningGateway, servers: list[FakeRolloutServer], nonsense: Any
) -> None:
    servers[0].nonsense = nonsense
    reply = publish(gateway, 3)
    assert reply.status_code == 207
    assert [result["ok"] for result in reply.json()["results"]] == [False, True]


@pytest.mark.parametrize("nonsense", [[1], {"state": 7}, {"version": 0}, "ready"])
def test_a_server_whose_status_is_nonsense_is_dead_and_the_others_live(
    gateway: RunningGateway, servers: list[FakeRolloutServer], nonsense: Any
) -> None:
    servers[0].status_nonsense = nonsense
    wait_until(lambda: [s["state"] for s in status_of(gateway)["rollout_servers"]] == ["dead", "ready"])
    servers[0].status_nonsense = None
    wait_until(lambda: [s["state"] for s in status_of(gateway)["rollout_servers"]] == ["ready", "ready"])


def test_a_drained_server_stays_so_when_it_registers_again(
    gateway: RunningGateway,
    servers: list[FakeRolloutServer],
    own_backends: Backends,
    endpoints: list[tuple[str, Endpoint]],
) -> None:
    gateway.post("/admin/rollout_servers/r0/drain", key=ADMIN_KEY)
    register(gateway, "r0", endpoints[0][0], own_backends.engine_url)
    states = {s["id"]: s["state"] for s in status_of(gateway)["rollout_servers"]}
    assert states == {"r0": "draining", "r1": "ready"}


def test_a_known_number_that_went_by_is_not_published_again(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    publish(gateway, 1)
    publish(gateway, 2)
    assert publish(gateway, 1).status_code == 409
    states = {p["version"]: p["state"] for p in gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]}
    assert states == {0: "retired", 1: "retired", 2: "serving"}


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the fleet", "is dead"])
def test_nobody_waits_for_a_push_if_the_only_servers_left_are_pinned(
    gateway: RunningGateway, servers: list[FakeRolloutServer], leaves: bool
) -> None:
    assert post(gateway, "/0/pin", {"servers": ["r0"]}).status_code == 200
    if leaves:
        assert gateway.call("DELETE", "/admin/rollout_servers/r1", key=ADMIN_KEY).is_success
    else:
        servers[1].status_nonsense = "dead"
        wait_until(lambda: [s["state"] for s in status_of(gateway)["rollout_servers"]] == ["ready", "dead"])
    reply = publish(gateway, 1)
    assert (reply.status_code, reply.json()["state"]) == (207, "pushing")
    assert servers[0].version == 0


def test_numbers_only_grow_and_name_one_content(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    assert publish(gateway, 5).status_code == 200
    assert publish(gateway, 4).status_code == 409
    assert publish(gateway, 5, manifest_sha256="other").status_code == 409
    assert publish(gateway, 5).status_code == 200
    assert publish(gateway, None).json()["version"] == 6


@pytest.mark.parametrize("number", [-1, 2**53, 2**64, 10**40])
def test_a_number_that_not_every_reader_can_hold_is_refused(
    gateway: RunningGateway, servers: list[FakeRolloutServer], number: int
) -> None:
    replies = [
        publish(gateway, number),
        publish(gateway, 3, step=number),
        gateway.post("/admin/policies/rollback", {"to": number}, key=ADMIN_KEY),
    ]
    for reply in replies:
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not servers[0].reloads
    assert publish(gateway, 2**53 - 1).status_code == 200


def test_a_rollback_serves_the_old_version_under_its_own_number(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    publish(gateway, 1)
    publish(gateway, 2)
    assert gateway.post("/admin/policies/rollback", {"to": 1}, key=ADMIN_KEY).status_code == 200
    assert [server.version for server in servers] == [1, 1]
    assert servers[0].reloads[-1]["force"] is True
    states = {p["version"]: p["state"] for p in gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]}
    assert states == {0: "retired", 1: "serving", 2: "retired"}
    assert gateway.post("/admin/policies/rollback", {"to": 0}, key=ADMIN_KEY).status_code == 200
    assert (servers[0].version, servers[0].reloads[-1]["location"]) == (0, None)
    assert gateway.post("/admin/policies/9/promote", key=ADMIN_KEY).status_code == 404


def test_a_server_that_joins_hears_the_current_policy(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    publish(gateway, 2, manifest_sha256=64 * "c")
    late = FakeRolloutServer()
    with serving(late.app()) as url:
        assert register(gateway, "late", url, url)["policy"]["version"] == 0, "it serves an admissible one"
        wait_until(lambda: late.version == 2)
        late.version, late.state = 0, "starting"
        told = register(gateway, "late", url, url)["policy"]
    assert (told["version"], told["location"], told["manifest_sha256"]) == (2, "file:///policies/2", 64 * "c")


# A trainer and an operator that both publish


@dataclass
class Trainer:
    """The trainer's use of version numbers: it reserves one before a step, and announces it afterwards."""

    publisher: Publisher
    version: int = 0

    def take(self) -> int:
        """Reserve the number of a step that begins. The new weights get it, published or not."""
        newest = self.publisher.newest_version(self.version)
        while newest >= self.version:
            self.version = newest + 1
            newest = self.publisher.reserve(self.version)
        return self.version

    def announce(self, version: int | None = None) -> None:
        """Publish a version; by default, the one whose number was reserved last."""
        made = version or self.version
        self.publisher.publish(made, made, lambda: OneTensor("made for", made))


@contextmanager
def trainer_that_keeps(keep: int, gateway: RunningGateway, tmp_path: Path) -> Iterator[Trainer]:
    stream = claimed_reader(gateway.redis)
    store = PolicyStore(tmp_path / "policies", tmp_path, keep)
    heartbeat, metrics = Heartbeat(stream, SharedState(), retry_s=0.01), TrainerMetrics(CollectorRegistry())
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=120) as client:
        yield Trainer(
            Publisher(
                store,
                GatewayClient(client, 10.0),
                stream,
                DiskPlace(store),
                heartbeat,
                metrics,
                InlineExecutor(),
            )
        )


@pytest.fixture
def trainer(gateway: RunningGateway, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_that_keeps(1000, gateway, tmp_path) as trainer:
        yield trainer


def locations(gateway: RunningGateway) -> dict[int, str]:
    published = gateway.get("/admin/policies", key=ADMIN_KEY).json()["data"]
    return {policy["version"]: policy["location"] for policy in published}


def test_a_number_that_the_trainer_works_on_is_nobody_elses(
    gateway: RunningGateway, servers: list[FakeRolloutServer], trainer: Trainer
) -> None:
    taken = trainer.take()
    for number in range(1, taken + 1):
        refused = publish(gateway, number)
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict_error")
    assert not servers[0].reloads
    trainer.announce()
    wait_until(lambda: [server.version for server in servers] == [taken, taken])
    assert locations(gateway)[taken].endswith(f"/policies/v{taken:08d}")
    assert publish(gateway, None).json()["version"] == taken + 1


def test_a_version_is_published_although_the_steps_after_it_have_begun(
    gateway: RunningGateway, servers: list[FakeRolloutServer], trainer: Trainer
) -> None:
    """Versions are written while the training goes on. If groups always wait, the next step begins first."""
    made, _, stepping = trainer.take(), trainer.take(), trainer.take()
    trainer.announce(made)
    wait_until(lambda: [server.version for server in servers] == [made, made])
    assert locations(gateway)[made].endswith(f"/policies/v{made:08d}")
    assert publish(gateway, made + 1).status_code == 409
    trainer.announce(stepping)
    wait_until(lambda: [server.version for server in servers] == [stepping, stepping])
    assert publish(gateway, None).json()["version"] == stepping + 1


def test_an_operator_who_publishes_during_a_step_gets_another_number(
    gateway: RunningGateway, servers: list[FakeRolloutServer], trainer: Trainer
) -> None:
    taken = trainer.take()
    assert publish(gateway, None).json()["version"] == taken + 1
    trainer.announce()  # too late: newly published numbers only grow
    assert locations(gateway) == {0: None, taken + 1: "file:///policies/None"}
    assert trainer.take() == taken + 2
    trainer.announce()
    wait_until(lambda: [server.version for server in servers] == [taken + 2, taken + 2])


def test_a_trainer_has_the_fleet_go_back_and_then_on(
    gateway: RunningGateway,
    servers: list[FakeRolloutServer],
    trainer: Trainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for version in (1, 2, 3):
        trainer.take()
        trainer.announce()
        wait_until(lambda v=version: [server.version for server in servers] == [v, v])  # type: ignore[misc]
    for version in (2, 0, 1):
        trainer.publisher.roll_back(version)
        assert [server.version for server in servers] == [version, version]
    told = len(servers[0].reloads)
    trainer.publisher.roll_back(1)
    assert len(servers[0].reloads) == told, "the version is served already"
    trainer.publisher.roll_back(9)
    assert "the fleet goes on with what it serves: no policy has version 9" in caplog.text
    servers[0].refuse = True
    trainer.publisher.roll_back(2)
    assert [server.version for server in servers] == [1, 2]
    servers[0].refuse = False
    trainer.announce()  # version 3 once more
    wait_until(lambda: [server.version for server in servers] == [3, 3])
    assert trainer.take() == 4
    trainer.announce()
    wait_until(lambda: [server.version for server in servers] == [4, 4])


def test_a_number_that_the_trainer_takes_while_another_policy_is_registered_is_its_own(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, look = claimed_reader(gateway.redis), PolicyRegister.look
    answers: list[int] = []

    async def look_and_pause(register: PolicyRegister) -> KnownPolicies:
        """The trainer acts after the gateway has read the register and before it writes."""
        known = await look(register)
        if not answers:
            answers.append(trainers.reserve(1, "file:///trainer/1"))
        return known

    monkeypatch.setattr(PolicyRegister, "look", look_and_pause)
    assert publish(gateway, None).json()["version"] == 2
    assert answers == [-1]


def test_an_operator_and_a_trainer_who_publish_at_once_never_share_a_number(
    gateway: RunningGateway, trainer: Trainer
) -> None:
    with ThreadPoolExecutor() as pool:
        published = [pool.submit(publish, gateway, None) for _ in range(40)]
        trained = []
        for _ in range(20):
            trained.append(trainer.take())
            trainer.announce()
        by_hand = [reply.result().json()["version"] for reply in published]
    assert len({*by_hand, *trained}) == len(by_hand) + len(trained)
    for number, location in locations(gateway).items():
        assert (number in by_hand) == (location == "file:///policies/None")


def test_a_full_redis_takes_a_policy(gateway: RunningGateway) -> None:
    """Otherwise the trainer would wait for the push, and acknowledge no entries meanwhile."""
    assert publish(gateway, None).json()["version"] == 1
    gateway.redis.config_set("maxmemory", 1)
    try:
        assert publish(gateway, None).status_code == 200
        assert status_of(gateway)["policy"]["serving"] == 2
    finally:
        gateway.redis.config_set("maxmemory", 0)


def test_a_client_key_publishes_nothing(gateway: RunningGateway) -> None:
    assert gateway.post("/admin/policies", {"location": "file:///x"}).status_code == 403
    assert gateway.post("/admin/policies", {"location": 7}, key=ADMIN_KEY).status_code == 400


# Numbers, holds, and versions whose files are removed


def post(gateway: RunningGateway, path: str, body: Any = None) -> Any:
    return gateway.post(f"/admin/policies{path}", body, key=ADMIN_KEY)


def listed(gateway: RunningGateway) -> dict[int, str]:
    page = gateway.get("/admin/policies", key=ADMIN_KEY).json()
    return {policy["version"]: policy["state"] for policy in page["data"]}


def test_a_number_beyond_the_next_free_one_needs_force(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    refused = publish(gateway, 2, force=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_gap")
    assert "the next free version is 1" in refused.json()["error"]["message"]
    assert publish(gateway, 1, force=False).status_code == 200
    assert publish(gateway, 1000, force=True).status_code == 200
    assert listed(gateway) == {0: "retired", 1: "retired", 1000: "serving"}


def test_a_version_that_every_server_refuses_takes_no_number(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    for server in servers:
        server.refuse = True
    for content in ("a", "b"):
        reply = publish(gateway, None, manifest_sha256=64 * content)
        assert (reply.status_code, reply.json()["version"], reply.json()["state"]) == (207, 1, "failed")
    assert listed(gateway) == {0: "serving"}
    message = gateway.get("/admin/policies/1", key=ADMIN_KEY).json()["error"]["message"]
    assert "its push failed: r0: a tensor is missing; r1: a tensor is missing" in message
    for server in servers:
        server.refuse = False
    assert publish(gateway, 1, force=False, manifest_sha256=64 * "c").status_code == 200
    assert [server.manifest for server in servers] == [64 * "c", 64 * "c"]


def test_a_number_is_taken_if_a_server_did_not_say_that_it_refused(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    servers[0].refuse, servers[1].nonsense = True, {"ok": True, "version": 7}
    assert publish(gateway, None).json()["state"] == "failed"
    assert len(servers[1].reloads) == 3, "it may be a fault that passes"
    servers[0].refuse, servers[1].nonsense = False, None
    assert publish(gateway, None).json()["version"] == 2
    assert listed(gateway) == {0: "retired", 1: "published", 2: "serving"}


def test_a_rollback_holds_until_the_fleet_is_released(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    for version in (1, 2):
        publish(gateway, version)
    assert post(gateway, "/rollback", {"to": 1}).json()["state"] == "serving"
    assert status_of(gateway)["policy"]["admissible"] == [1, 0], "the version that was left answers no calls"
    reply = publish(gateway, 3)
    assert (reply.status_code, reply.json()["state"], reply.json()["results"]) == (200, "held", [])
    assert [server.version for server in servers] == [1, 1]
    assert listed(gateway) == {0: "retired", 1: "serving", 2: "retired", 3: "published"}
    assert "rolled back to version 1" in status_of(gateway)["policy"]["hold"]["reason"]
    released = post(gateway, "/release")
    assert (released.status_code, released.json()["serving"], released.json()["hold"]) == (200, 3, None)
    assert [server.version for server in servers] == [3, 3]
    assert publish(gateway, 4).json()["state"] == "serving"


def test_a_promoted_version_ends_a_hold(gateway: RunningGateway, servers: list[FakeRolloutServer]) -> None:
    assert post(gateway, "/hold", {"reason": "an evaluation"}).json()["hold"]["reason"] == "an evaluation"
    for version in (1, 2):
        assert publish(gateway, version).json()["state"] == "held"
    assert post(gateway, "/1/promote").json()["state"] == "serving"
    assert [server.version for server in servers] == [1, 1]
    assert publish(gateway, 3).json()["state"] == "serving"


def test_a_version_is_removed_only_if_nothing_needs_it(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    def remove(version: int) -> int:
        return int(gateway.http.delete(f"{gateway.url}/admin/policies/{version}", headers=admin).status_code)

    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    for version in range(1, 8):
        publish(gateway, version)
    assert status_of(gateway)["policy"]["admissible"] == [7, 6, 5, 4, 3]
    assert [remove(version) for version in (1, 2, 3, 7, 9)] == [200, 200, 409, 409, 404]
    assert remove(1) == 200, "again"
    assert sorted(listed(gateway)) == [0, 3, 4, 5, 6, 7]
    refused = post(gateway, "/rollback", {"to": 1})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == (
        "the files of version 1 were removed; versions that can be served: 0, 3, 4, 5, 6, 7"
    )
    assert post(gateway, "/rollback", {"to": 3}).status_code == 200
    assert remove(7) == 409, "its number is never given again"


def test_a_trainer_removes_the_files_of_versions_that_nothing_needs(
    gateway: RunningGateway, servers: list[FakeRolloutServer], tmp_path: Path
) -> None:
    with trainer_that_keeps(2, gateway, tmp_path) as trainer:
        for version in range(1, 9):
            trainer.take()
            trainer.announce()
            wait_until(lambda v=version: [server.version for server in servers] == [v, v])  # type: ignore[misc]
        on_disk = trainer.publisher.versions()
    assert sorted(listed(gateway)) == [0, *on_disk]
    # When the files were removed, 7 was served, or 8 was already; and the four before it may answer calls.
    assert on_disk in ([3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8])


def test_an_announced_version_is_pushed_while_the_caller_goes_on(
    gateway: RunningGateway, servers: list[FakeRolloutServer]
) -> None:
    for server in servers:
        server.slow = True
    reply = post(gateway, "?wait=false", {"location": "file:///policies/1"})
    assert (reply.status_code, reply.json()["state"]) == (202, "pushing")
    again = post(gateway, "?wait=false", {"version": 1, "location": "file:///policies/1"})
    assert again.json()["push"]["id"] == reply.json()["push"]["id"], "a repeated request is the same push"
    for server in servers:
        server.slow = False
    wait_until(lambda: listed(gateway).get(1) == "serving")
    wait_until(lambda: status_of(gateway)["policy"]["push"]["state"] == "serving")
    detail = gateway.get("/admin/policies/1", key=ADMIN_KEY).json()
    assert (detail["push"]["proved"], detail["push"]["servers"]) == (2, 2)
    assert [each["state"] for each in detail["results"]] == ["proved", "proved"]


def test_a_publisher_does_not_wait_for_servers_that_are_away_beside_a_bare_engine(
    own_backends: Backends, endpoints: list[tuple[str, Endpoint]]
) -> None:
    url, actor = endpoints[0]
    actor.part = FakeRolloutServer(state="failed")
    own_backends.clear(None)
    with own_backends.gateway() as gateway:  # with a bare engine
        register(gateway, "r0", url, own_backends.engine_url)
        (result,) = publish(gateway, 1).json()["results"]
        assert (result["server"], result["state"]) == ("r0", "unavailable")
