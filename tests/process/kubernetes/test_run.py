"""The pods of the overlay cpu-demo, run as the containers that they describe: a model learns.

docker compose --profile demo build && pytest tests/process/kubernetes/test_run.py
"""

import re

import pytest

from tests.support.kubernetes.docker import why_no_engine
from tests.support.kubernetes.kubelet import Node, node
from tests.support.kubernetes.pods import pods_of
from tests.support.kubernetes.rendered import ROOT, Object

SERVICES = ("redis", "gateway", "rollout-server", "trainer")
MODELS = ROOT / "run" / "models"
"""Where `make demo` keeps its model. If there is one, the Job finds it on its volume; else it makes one."""
STARTS_WITHIN_S = 3600.0
"""The model is made, and the engine boots, on few and busy cores."""
LEARNS_WITHIN_S = 1800.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(STARTS_WITHIN_S + LEARNS_WITHIN_S + 600)]


@pytest.fixture
def demo(overlays: dict[str, list[Object]]) -> list[Object]:
    objects = overlays["cpu-demo"]
    images = {each["image"] for pod in pods_of(objects).values() for each in pod.containers}
    if (reason := why_no_engine(images)) is not None:
        pytest.skip(reason)
    return objects


def test_a_model_learns_in_the_containers_that_the_manifests_describe(demo: list[Object]) -> None:
    pods = pods_of(demo)
    with node(demo) as running:
        for made in sorted(MODELS.glob("tool-*-seed0"))[:1]:
            running.fill("model", made, "policy")
        running.start(*(pod for pod in pods.values() if pod.name != "agent"))
        running.wait(lambda: running.ready("redis"), STARTS_WITHIN_S)
        running.wait(lambda: running.succeeded("model"), STARTS_WITHIN_S)
        running.wait(lambda: running.ready(*SERVICES), STARTS_WITHIN_S)
        assert served(running) == 0
        running.start(pods["agent"])
        running.wait(lambda: served(running) > 0, LEARNS_WITHIN_S)
        running.end("agent")
        ended = {name: running.end(name) for name in ("gateway", "rollout-server", "trainer", "redis")}
        assert set(ended.values()) == {("exited", 0)}, ended


def served(running: Node) -> int:
    """The version that the gateway names."""
    metrics = running.ask("gateway", "http://127.0.0.1:8000/metrics")
    found = re.search(r"^weir_serving_version ([-\d.]+)$", metrics, re.M)
    return int(float(found[1])) if found else -1
