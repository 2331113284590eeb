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
from tokenizers import Tokenizer

from rollout_queue.redis.policy_register import KnownPolicies, PolicyRegister
from tests.support.claimed import claimed_reader
from tests.support.gateway.fake_rollout_server import Endpoint, FakeRolloutServer
from tests.support.gateway.full_redis import full
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway, backends_in
from tests.support.serving import serving
from tests.support.trainer_service.publications import InlineExecutor, OneTensor
from tests.support.waiting import wait_until
from trainer_service.heartbeat import Heartbeat
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace
from trainer_service.publishing.publisher import Publisher
from trainer_service.shared_state import SharedState
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.trainer_metrics import TrainerMetrics


@pytest.fixture(scope="module")
def fleet_url(own_backends: Backends) -> Iterator[tuple[str, bytes]]:
    """A gateway without engines in its configuration, and its secret."""
    own_backends.clear(None)
    with own_backends.gateway_url(engines=[]) as url:
        yield url, own_backends.secret()


@pytest.fixture(scope="module")
def endpoints() -> Iterator[dict[str, Endpoint]]:
    """Two server addresses that all tests share; each test puts fresh fake servers behind them."""
    endpoints = [Endpoint(), Endpoint()]
    with serving(endpoints[0]) as one, serving(endpoints[1]) as two:
        yield dict(zip((one, two), endpoints, strict=True))


@dataclass
class Fleet:
    """A gateway, and the fake rollout servers r0 and r1."""

    gateway: RunningGateway
    engine_url: str
    urls: list[str]
    servers: list[FakeRolloutServer]

    def register(self, server_id: str, url: str) -> Any:
        body = {"id": server_id, "url": url, "engine_url": self.engine_url}
        reply = self.gateway.admin("POST", "/rollout_servers", body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, path: str, body: Any = None) -> Any:
        return self.gateway.admin("POST", f"/policies{path}", body or {})

    def publish(self, version: int | None, **fields: Any) -> Any:
        """`force` allows numbers that are not the next one."""
        return self.post(
            "", {"version": version, "location": f"file:///policies/{version}", "force": True, **fields}
        )

    def status(self) -> Any:
        return self.gateway.admin("GET", "/status").json()

    @property
    def policy(self) -> Any:
        """What the status says of the policy that is served."""
        return self.status()["policy"]

    def detail(self, version: int) -> Any:
        return self.gateway.admin("GET", f"/policies/{version}").json()

    def listed(self, field: str = "state") -> dict[int, Any]:
        """A field of each version."""
        return {
            each["version"]: each[field] for each in self.gateway.admin("GET", "/policies").json()["data"]
        }

    def versions(self) -> list[int]:
        return [server.version for server in self.servers]

    def until(self, version: int) -> None:
        wait_until(lambda: self.versions() == [version, version])

    def until_states(self, *states: str) -> None:
        """Wait until the gateway finds the servers so."""
        wait_until(lambda: [each["state"] for each in self.status()["rollout_servers"]] == list(states))

    def engines_of_sessions(self, count: int) -> set[str]:
        """The servers that answered one call of each of `count` new sessions."""
        engines = set()
        for _ in range(count):
            session = self.gateway.session()
            self.gateway.chat(session=session)
            engines |= {turn["engine"] for turn in self.gateway.turns(session)}
        return engines


@pytest.fixture
def empty(own_backends: Backends, fleet_url: tuple[str, bytes]) -> Iterator[Fleet]:
    """A gateway that knows no server."""
    own_backends.clear(fleet_url[1])
    with httpx.Client(timeout=120) as http:
        gateway = RunningGateway(fleet_url[0], own_backends.engine, own_backends.redis, http)
        fleet = Fleet(gateway, own_backends.engine_url, [], [])
        fleet.until_states()
        wait_until(lambda: fleet.policy["serving"] is None)
        yield fleet


@pytest.fixture
def fleet(empty: Fleet, endpoints: dict[str, Endpoint]) -> Fleet:
    for index, (url, endpoint) in enumerate(endpoints.items()):
        endpoint.part = FakeRolloutServer()
        empty.register(f"r{index}", url)
        empty.servers.append(endpoint.part)
        empty.urls.append(url)
    return empty


def test_a_push_reaches_every_server_and_reports_each(fleet: Fleet) -> None:
    assert (fleet.listed(), fleet.listed("location")) == ({0: "serving"}, {0: None}), (
        "they registered with it"
    )
    assert fleet.servers[0].keys == {f"Bearer {ADMIN_KEY}"}
    reply = fleet.publish(3, manifest_sha256=64 * "a", step=9)
    assert reply.status_code == 200
    results = [(each["server"], each["ok"], each["version_served"]) for each in reply.json()["results"]]
    assert results == [("r0", True, 3), ("r1", True, 3)]
    prepared, loaded = fleet.servers[1].reloads
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
    assert fleet.policy["serving"] == 3


def test_one_failure_is_207_and_the_failed_server_goes_on_with_the_version_before(fleet: Fleet) -> None:
    fleet.servers[0].refuse = True
    reply = fleet.publish(3)
    assert reply.status_code == 207
    assert reply.json()["results"][0]["error"] == "a tensor is missing"
    assert "server r0 refused version 3: a tensor is missing" in fleet.status()["warnings"]
    assert fleet.policy["admissible"] == [3, 0]
    fleet.until_states("ready", "ready")
    assert fleet.engines_of_sessions(24) == {"r0", "r1"}
    for version in range(4, 8):
        assert fleet.publish(version).status_code == 207
    assert fleet.policy["admissible"] == [7, 6, 5, 4, 3]
    assert fleet.engines_of_sessions(8) == {"r1"}, "a server too many versions behind gets no calls"


def test_a_server_that_fails_is_named_as_long_as_it_lacks_the_version(fleet: Fleet) -> None:
    """Within `max_version_lag` it goes on answering calls, so nothing else would show it."""
    fleet.servers[0].refuse, fleet.servers[0].refusal = True, 500
    said = "server r0 did not load version 3: a tensor is missing; it is asked again"
    assert fleet.publish(3).status_code == 207
    assert said in fleet.status()["warnings"]
    fleet.servers[0].refuse = False
    fleet.until(3)
    wait_until(lambda: said not in fleet.status()["warnings"])
    fleet.servers[0].refuse = True
    assert fleet.post("/0/pin", {"servers": ["r0"]}).status_code in (200, 202)
    said = "server r0 did not load version 0: a tensor is missing; it is asked again"
    wait_until(lambda: said in fleet.status()["warnings"])


def test_a_slow_server_does_not_keep_the_others_out_of_rotation(fleet: Fleet) -> None:
    fleet.servers[1].slow = True
    with ThreadPoolExecutor() as pool:
        push = pool.submit(fleet.publish, 3)
        try:
            wait_until(lambda: fleet.policy["serving"] == 3)
            assert fleet.policy["admissible"] == [3, 0]
            assert fleet.engines_of_sessions(24) == {"r0", "r1"}
        finally:
            fleet.servers[1].slow = False
        assert push.result().status_code == 200


@pytest.mark.parametrize("nonsense", ["yes", {"ok": True}, {"ok": True, "version": 2}])
def test_a_server_that_does_not_prove_the_version_failed(fleet: Fleet, nonsense: Any) -> None:
    fleet.servers[0].nonsense = nonsense
    reply = fleet.publish(3)
    assert reply.status_code == 207
    assert [result["ok"] for result in reply.json()["results"]] == [False, True]


@pytest.mark.parametrize("nonsense", [[1], {"state": 7}, {"version": 0}, "ready"])
def test_a_server_whose_status_is_nonsense_is_dead_and_the_others_live(fleet: Fleet, nonsense: Any) -> None:
    fleet.servers[0].status_nonsense = nonsense
    fleet.until_states("dead", "ready")
    fleet.servers[0].status_nonsense = None
    fleet.until_states("ready", "ready")


def test_a_drained_server_stays_so_when_it_registers_again(fleet: Fleet) -> None:
    fleet.gateway.admin("POST", "/rollout_servers/r0/drain")
    fleet.register("r0", fleet.urls[0])
    states = {each["id"]: each["state"] for each in fleet.status()["rollout_servers"]}
    assert states == {"r0": "draining", "r1": "ready"}
    counted = {'weir_rollout_servers{state="draining"} 1.0', 'weir_rollout_servers{state="ready"} 1.0'}
    wait_until(lambda: counted <= {*fleet.gateway.get("/metrics").text.splitlines()})


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves the fleet", "is dead"])
def test_nobody_waits_for_a_push_if_the_only_servers_left_are_pinned(fleet: Fleet, leaves: bool) -> None:
    assert fleet.post("/0/pin", {"servers": ["r0"]}).status_code == 200
    if leaves:
        assert fleet.gateway.admin("DELETE", "/rollout_servers/r1").is_success
    else:
        fleet.servers[1].status_nonsense = "dead"
        fleet.until_states("ready", "dead")
    reply = fleet.publish(1)
    assert (reply.status_code, reply.json()["state"]) == (207, "pushing")
    assert fleet.servers[0].version == 0


def test_numbers_only_grow_and_name_one_content(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.publish(2)
    assert fleet.publish(1).status_code == 409, "it went by"
    assert fleet.listed() == {0: "retired", 1: "retired", 2: "serving"}
    refused = fleet.publish(5, force=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_gap")
    assert "the next free version is 3" in refused.json()["error"]["message"]
    assert fleet.publish(3, force=False).status_code == 200
    assert fleet.publish(5).status_code == 200
    assert fleet.listed() == {0: "retired", 1: "retired", 2: "retired", 3: "retired", 5: "serving"}
    assert fleet.publish(4).status_code == 409
    assert fleet.publish(5, manifest_sha256="other").status_code == 409
    assert fleet.publish(5).status_code == 200
    assert fleet.publish(None).json()["version"] == 6


def test_a_number_that_not_every_reader_can_hold_is_refused(fleet: Fleet) -> None:
    for number in (-1, 2**53, 2**64, 10**40):
        as_step, back = fleet.publish(3, step=number), fleet.post("/rollback", {"to": number})
        for reply in (fleet.publish(number), as_step, back):
            assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), (
                number
            )
    assert not fleet.servers[0].reloads
    assert fleet.publish(2**53 - 1).status_code == 200


def test_a_rollback_serves_the_old_version_under_its_own_number(fleet: Fleet) -> None:
    fleet.publish(1)
    fleet.publish(2)
    assert fleet.post("/rollback", {"to": 1}).status_code == 200
    assert fleet.versions() == [1, 1]
    assert fleet.servers[0].reloads[-1]["force"] is True
    assert fleet.listed() == {0: "retired", 1: "serving", 2: "retired"}
    assert fleet.post("/rollback", {"to": 0}).status_code == 200
    assert (fleet.servers[0].version, fleet.servers[0].reloads[-1]["location"]) == (0, None)
    assert fleet.post("/9/promote").status_code == 404


def test_a_server_that_joins_hears_the_current_policy(fleet: Fleet) -> None:
    fleet.publish(2, manifest_sha256=64 * "c")
    late = FakeRolloutServer()
    with serving(late.app()) as url:
        assert fleet.register("late", url)["policy"]["version"] == 0, "it serves an admissible one"
        wait_until(lambda: late.version == 2)
        late.version, late.state = 0, "starting"
        told = fleet.register("late", url)["policy"]
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
    stream, store = claimed_reader(gateway.redis), PolicyStore(tmp_path / "policies", tmp_path, keep)
    heartbeat, metrics = Heartbeat(stream, SharedState(), retry_s=0.01), TrainerMetrics(CollectorRegistry())
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=120) as client:
        to, place = GatewayClient(client, 10.0), DiskPlace(store)
        yield Trainer(Publisher(store, to, stream, place, heartbeat, metrics, InlineExecutor()))


@pytest.fixture
def trainer(empty: Fleet, tmp_path: Path) -> Iterator[Trainer]:
    with trainer_that_keeps(1000, empty.gateway, tmp_path) as trainer:
        yield trainer


def test_numbers_that_the_trainer_works_on_are_nobody_elses(fleet: Fleet, trainer: Trainer) -> None:
    """Versions are written while the training goes on. If groups always wait, the next step begins first."""
    made, _, stepping = trainer.take(), trainer.take(), trainer.take()
    for number in range(1, stepping + 1):
        refused = fleet.publish(number)
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict_error")
    assert not fleet.servers[0].reloads
    trainer.announce(made)
    fleet.until(made)
    assert fleet.listed("location")[made].endswith(f"/policies/v{made:08d}")
    assert fleet.publish(made + 1).status_code == 409
    trainer.announce(stepping)
    fleet.until(stepping)
    assert fleet.publish(None).json()["version"] == stepping + 1


def test_an_operator_who_publishes_during_a_step_gets_another_number(fleet: Fleet, trainer: Trainer) -> None:
    taken = trainer.take()
    assert fleet.publish(None).json()["version"] == taken + 1
    trainer.announce()  # too late: newly published numbers only grow
    assert fleet.listed("location") == {0: None, taken + 1: "file:///policies/None"}
    assert trainer.take() == taken + 2
    trainer.announce()
    fleet.until(taken + 2)


def test_a_trainer_has_the_fleet_go_back_and_then_on(
    fleet: Fleet, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2, 3):
        trainer.take()
        trainer.announce()
        fleet.until(version)
    for version in (2, 0, 1):
        trainer.publisher.roll_back(version)
        assert fleet.versions() == [version, version]
    told = len(fleet.servers[0].reloads)
    trainer.publisher.roll_back(1)
    assert len(fleet.servers[0].reloads) == told, "the version is served already"
    trainer.publisher.roll_back(9)
    assert "the fleet goes on with what it serves: no policy has version 9" in caplog.text
    fleet.servers[0].refuse = True
    trainer.publisher.roll_back(2)
    assert fleet.versions() == [1, 2]
    fleet.servers[0].refuse = False
    trainer.announce()  # version 3 once more
    fleet.until(3)
    assert trainer.take() == 4
    trainer.announce()
    fleet.until(4)


def test_a_number_that_the_trainer_takes_while_another_policy_is_registered_is_its_own(
    empty: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers, look = claimed_reader(empty.gateway.redis), PolicyRegister.look
    answers: list[int] = []

    async def look_and_pause(register: PolicyRegister) -> KnownPolicies:
        """The trainer acts after the gateway has read the register and before it writes."""
        known = await look(register)
        if not answers:
            answers.append(trainers.reserve(1, "file:///trainer/1"))
        return known

    monkeypatch.setattr(PolicyRegister, "look", look_and_pause)
    assert empty.publish(None).json()["version"] == 2
    assert answers == [-1]


def test_an_operator_and_a_trainer_who_publish_at_once_never_share_a_number(
    empty: Fleet, trainer: Trainer
) -> None:
    with ThreadPoolExecutor() as pool:
        published = [pool.submit(empty.publish, None) for _ in range(40)]
        trained = []
        for _ in range(20):
            trained.append(trainer.take())
            trainer.announce()
        by_hand = [reply.result().json()["version"] for reply in published]
    assert len({*by_hand, *trained}) == len(by_hand) + len(trained)
    for number, location in empty.listed("location").items():
        assert (number in by_hand) == (location == "file:///policies/None")


def test_a_full_redis_takes_a_policy(empty: Fleet) -> None:
    """Otherwise the trainer would wait for the push, and acknowledge no entries meanwhile."""
    assert empty.publish(None).json()["version"] == 1
    with full(empty.gateway):
        assert empty.publish(None).status_code == 200
        assert empty.policy["serving"] == 2


def test_a_client_key_publishes_nothing(empty: Fleet) -> None:
    assert empty.gateway.post("/admin/policies", {"location": "file:///x"}).status_code == 403
    assert empty.post("", {"location": 7}).status_code == 400


# Numbers, holds, and versions whose files are removed


def test_a_version_that_every_server_refuses_takes_no_number(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.refuse = True
    for content in ("a", "b"):
        reply = fleet.publish(None, manifest_sha256=64 * content)
        assert (reply.status_code, reply.json()["version"], reply.json()["state"]) == (207, 1, "failed")
    assert (fleet.listed(), fleet.gateway.chat().status_code) == ({0: "serving"}, 200)
    message = fleet.detail(1)["error"]["message"]
    assert "its push failed: r0: a tensor is missing; r1: a tensor is missing" in message
    said = (
        "the last 2 pushes were refused: r0: a tensor is missing; r1: a tensor is missing; the fleet serves"
    )
    assert any(said in warning for warning in fleet.status()["warnings"])
    for server in fleet.servers:
        server.refuse = False
    assert fleet.publish(1, force=False, manifest_sha256=64 * "c").status_code == 200
    assert not any("refused" in warning for warning in fleet.status()["warnings"])
    assert [server.manifest for server in fleet.servers] == [64 * "c", 64 * "c"]


def test_a_number_is_taken_if_a_server_did_not_say_that_it_refused(fleet: Fleet) -> None:
    fleet.servers[0].refuse, fleet.servers[1].nonsense = True, {"ok": True, "version": 7}
    assert fleet.publish(None).json()["state"] == "failed"
    assert len(fleet.servers[1].reloads) == 3, "it may be a fault that passes"
    fleet.servers[0].refuse, fleet.servers[1].nonsense = False, None
    assert fleet.publish(None).json()["version"] == 2
    assert fleet.listed() == {0: "retired", 1: "published", 2: "serving"}


def test_a_rollback_holds_until_the_fleet_is_released(fleet: Fleet) -> None:
    for version in (1, 2):
        fleet.publish(version)
    assert fleet.post("/rollback", {"to": 1}).json()["state"] == "serving"
    assert fleet.policy["admissible"] == [1, 0], "the version that was left answers no calls"
    reply = fleet.publish(3)
    assert (reply.status_code, reply.json()["state"], reply.json()["results"]) == (200, "held", [])
    assert fleet.versions() == [1, 1]
    assert fleet.listed() == {0: "retired", 1: "serving", 2: "retired", 3: "published"}
    assert "rolled back to version 1" in fleet.policy["hold"]["reason"]
    released = fleet.post("/release")
    assert (released.status_code, released.json()["serving"], released.json()["hold"]) == (200, 3, None)
    assert fleet.versions() == [3, 3]
    assert fleet.publish(4).json()["state"] == "serving"


def test_a_promoted_version_ends_a_hold(fleet: Fleet) -> None:
    assert fleet.post("/hold", {"reason": "an evaluation"}).json()["hold"]["reason"] == "an evaluation"
    for version in (1, 2):
        assert fleet.publish(version).json()["state"] == "held"
    assert fleet.post("/1/promote").json()["state"] == "serving"
    assert fleet.versions() == [1, 1]
    assert fleet.publish(3).json()["state"] == "serving"


def test_a_version_is_removed_only_if_nothing_needs_it(fleet: Fleet) -> None:
    def remove(version: int) -> int:
        return int(fleet.gateway.admin("DELETE", f"/policies/{version}").status_code)

    for version in range(1, 8):
        fleet.publish(version)
    assert fleet.policy["admissible"] == [7, 6, 5, 4, 3]
    assert [remove(version) for version in (1, 2, 3, 7, 9)] == [200, 200, 409, 409, 404]
    assert remove(1) == 200, "again"
    assert sorted(fleet.listed()) == [0, 3, 4, 5, 6, 7]
    refused = fleet.post("/rollback", {"to": 1})
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == (
        "the files of version 1 were removed; versions that can be served: 0, 3, 4, 5, 6, 7"
    )
    assert fleet.post("/rollback", {"to": 3}).status_code == 200
    assert remove(7) == 409, "its number is never given again"


def test_a_trainer_removes_the_files_of_versions_that_nothing_needs(fleet: Fleet, tmp_path: Path) -> None:
    with trainer_that_keeps(2, fleet.gateway, tmp_path) as trainer:
        for version in range(1, 9):
            trainer.take()
            trainer.announce()
            fleet.until(version)
        on_disk = trainer.publisher.versions()
    assert sorted(fleet.listed()) == [0, *on_disk]
    # When the files were removed, 7 was served, or 8 was already; and the four before it may answer calls.
    assert on_disk in ([3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8])


def test_an_announced_version_is_pushed_while_the_caller_goes_on(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.slow = True
    reply = fleet.post("?wait=false", {"location": "file:///policies/1"})
    assert (reply.status_code, reply.json()["state"]) == (202, "pushing")
    again = fleet.post("?wait=false", {"version": 1, "location": "file:///policies/1"})
    assert again.json()["push"]["id"] == reply.json()["push"]["id"], "a repeated request is the same push"
    for server in fleet.servers:
        server.slow = False
    wait_until(lambda: fleet.listed().get(1) == "serving")
    wait_until(lambda: fleet.policy["push"]["state"] == "serving")
    detail = fleet.detail(1)
    assert (detail["push"]["proved"], detail["push"]["servers"]) == (2, 2)
    assert [each["state"] for each in detail["results"]] == ["proved", "proved"]


@pytest.fixture
def alone(redis_url: str, tiny_model: Path, tokenizer: Tokenizer) -> Iterator[Backends]:
    """Backends that have no gateway but those of the test."""
    with backends_in(5, redis_url, tiny_model, tokenizer) as backends:
        backends.clear(None)
        yield backends


def test_a_publisher_does_not_wait_for_servers_that_are_away_beside_a_bare_engine(alone: Backends) -> None:
    away = Endpoint(FakeRolloutServer(state="failed"))
    with serving(away) as url, alone.gateway() as gateway:  # with a bare engine
        fleet = Fleet(gateway, alone.engine_url, [], [])
        fleet.register("r0", url)
        (result,) = fleet.publish(1).json()["results"]
        assert (result["server"], result["state"]) == ("r0", "unavailable")


@pytest.mark.parametrize("known", ["a bare engine", "a server that refuses"])
def test_a_push_does_not_fail_before_a_server_that_registered_elsewhere_is_asked(
    alone: Backends, known: str
) -> None:
    refusing, able = Endpoint(FakeRolloutServer(refuse=True)), Endpoint(FakeRolloutServer())
    bare = known == "a bare engine"
    with (
        serving(refusing) as refusing_url,
        serving(able) as able_url,
        alone.gateway(engines=[alone.engine_url] if bare else [], poll_every_s=60.0) as leader,
        alone.gateway(engines=[]) as other,
    ):
        fleet = Fleet(leader, alone.engine_url, [], [])
        if not bare:
            fleet.register("r0", refusing_url)
        Fleet(other, alone.engine_url, [], []).register("r1", able_url)
        reply = fleet.publish(1)
    assert reply.json()["state"] == "serving", reply.text
    assert (reply.json()["results"][-1]["server"], able.part.version) == ("r1", 1)
