"""Pods as they run: the containers of the overlay cpu-demo learn, and the fleet's command runs on two hosts.

docker compose --profile demo build && pytest tests/process/kubernetes/test_run.py
"""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kubernetes.docker import why_no_engine
from tests.support.kubernetes.kubelet import Node, node
from tests.support.kubernetes.pods import FIRST_POD, environment, pods_of
from tests.support.kubernetes.rendered import ROOT, Object
from tests.support.trainer_service.host_pair import HostPair, host_pair, launched
from tests.support.trainer_service.hosts import NAMES, why_not
from tests.support.waiting import PATIENCE_S, wait_until

SERVICES = ("redis", "gateway", "rollout-server", "trainer")
MODELS = ROOT / "run" / "models"
"""Where `make demo` keeps its model. If there is one, the Job finds it on its volume; else it makes one."""
STARTS_WITHIN_S = 3600.0
"""The model is made, and the engine boots, on few and busy cores."""
LEARNS_WITHIN_S = 1800.0
REASON = why_not()

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


# The command of the fleet


@pytest.fixture
def pair(tmp_path: Path, tiny_model: Path) -> Iterator[HostPair]:
    with host_pair(tmp_path) as made:
        made.configure(tiny_model)
        yield made


@pytest.mark.skipif(REASON is not None, reason=f"two hosts on one machine: {REASON}")
def test_the_command_of_the_job_starts_a_trainer_over_two_hosts(
    pair: HostPair, overlays: dict[str, list[Object]]
) -> None:
    main = pods_of(overlays["fleet"])["trainer"].main
    given = [*main["command"], *main["args"]]
    assert given[0] == "python"
    assert len([word for word in given if FIRST_POD in word]) == 1
    words = [word.replace(FIRST_POD, NAMES[0]) for word in given[1:]]
    words[words.index("--nproc-per-node=8")] = "--nproc-per-node=1"
    own = {name: value for name, value in environment(main).items() if not name.startswith("WEIR_")}
    commands = [host.enter(sys.executable, *words, *pair.words) for host in pair.hosts]
    with launched(commands, [own] * 2, pair.folder / "log") as launchers:
        pair.train(launchers)
        before = pair.ranks()
        before[1].kill()
        pair.train(launchers)
        assert not set(before) & set(pair.ranks())
        wait_until(lambda: pair.saved_step() == 2)
        # The kubelet ends a pod by a signal to torchrun. Not 0: it did not end by itself.
        for process in launchers.processes:
            process.send_signal(signal.SIGTERM)
        assert 0 not in launchers.wait(PATIENCE_S + 60)
