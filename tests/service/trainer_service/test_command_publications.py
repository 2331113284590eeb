"""What commands publish is there when a server has proved it, and is refused when none takes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from rollout_queue.memory import MemoryStream
from tests.support.trainer_service.command_harness import FULL, MakeCommandHarness, learn, step
from tests.support.trainer_service.harness import FakeGateway
from tests.support.trainer_service.publications import InlineExecutor
from trainer_service.commands.publications import GatewayPublications
from trainer_service.commands.sampler_weights import NotPublished, WrittenAdapter
from trainer_service.metrics import TrainerMetrics
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.version_numbers import VersionNumbers
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256
from trainer_service.storage.run_files import VersionFile

ADAPTER = WrittenAdapter("math", 3, "file:///adapters/math/v00000003", "ab" * 32)
Answer = Callable[[httpx.Request], httpx.Response]


class AdapterGateway(FakeGateway):
    """Also has the route of adapters."""

    def __init__(self, *answers: httpx.Response) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self._answers = list(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/admin/adapters":
            return super().__call__(request)
        self.asked.append(httpx.Response(200, content=request.content).json())
        return self._answers.pop(0)


def publications(root: Path, gateway: FakeGateway) -> tuple[GatewayPublications, PolicyStore]:
    heartbeat = Heartbeat(stream := MemoryStream(), SharedState(), retry_s=0.01)
    client = GatewayClient(httpx.Client(transport=httpx.MockTransport(gateway), base_url="http://g"), 1.0)
    (root / "base").mkdir(parents=True)
    store, metrics = PolicyStore(root / "policies", root / "base", 4), TrainerMetrics(CollectorRegistry())
    place, disk = DiskPlace(store), DiskRetry(heartbeat, metrics, "publishing", "publish")
    publisher = Publisher(store, client, stream, place, heartbeat, metrics, InlineExecutor())
    numbers = VersionNumbers(VersionFile(root), publisher, disk)
    return GatewayPublications(client, heartbeat, publisher, numbers, store, place, 0), store


def told(status: int, *results: dict[str, Any]) -> httpx.Response:
    return httpx.Response(
        status, json={"name": "math", "version": 3, "model": "policy:math@3", "results": results}
    )


LOADED = {"server": "r0", "ok": True}
BROKEN = {"server": "r1", "ok": False, "error": "rank 64 is too large", "refused": True}
STARTING = {"server": "r0", "ok": False, "error": "the engine does not run"}


def test_an_adapter_is_published_when_one_server_has_it(tmp_path: Path) -> None:
    """Before that, the gateway is away, then no server is live, and then an engine starts."""
    away = httpx.Response(503, json={"error": {"message": "Redis is away"}})
    gateway = AdapterGateway(away, told(200), told(207, BROKEN, STARTING), told(207, BROKEN, LOADED))
    publications(tmp_path, gateway)[0].adapter(ADAPTER)
    body = {
        "name": "math",
        "version": 3,
        "location": ADAPTER.location,
        "manifest_sha256": ADAPTER.manifest_sha256,
        "passing": True,
    }
    assert gateway.asked == [body] * 4


def test_an_adapter_that_no_server_takes_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(NotPublished, match="no server has loaded math: rank 64 is too large"):
        publications(tmp_path, AdapterGateway(told(207, BROKEN)))[0].adapter(ADAPTER)


def test_a_version_with_other_content_is_not_published(tmp_path: Path) -> None:
    taken = httpx.Response(409, json={"error": {"message": "math has had version 3"}})
    with pytest.raises(NotPublished, match="the gateway refuses math: math has had version 3"):
        publications(tmp_path, AdapterGateway(taken))[0].adapter(ADAPTER)


def test_all_weights_are_the_next_version_of_the_policy(
    tmp_path: Path, make_command_harness: MakeCommandHarness
) -> None:
    harness, gateway = make_command_harness(), AdapterGateway()
    for command in (FULL, learn(1), step()):
        harness.send("m", command)
    publishing, store = publications(tmp_path / "published", gateway)
    for version in (1, 2):
        published = publishing.weights(harness.ranks, "m", step=version)
        path = store.path_of(version)
        assert (published.policy, published.version) == ("", version)
        assert published.location == path.resolve().as_uri()
        assert published.manifest_sha256 == manifest_sha256(path)
        assert published.size_bytes == store.size_of(version) > 0
    assert [each["version"] for each in gateway.announced] == [1, 2]
    gateway.server_ok = False
    with pytest.raises(NotPublished, match="no server has loaded version 3"):
        publishing.weights(harness.ranks, "m", step=3)
