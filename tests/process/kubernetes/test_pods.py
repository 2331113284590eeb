"""Every pod is closed, bounded and watched, and has the time that its service needs to end."""

from typing import Any

import pytest

from gateway.settings import GatewaySettings
from rollout_server.settings import RolloutServerSettings
from tests.support.kubernetes.pods import FIRST_POD, Pod, pods_of, ports
from tests.support.kubernetes.rendered import Object, named, of_kind
from tests.support.kubernetes.service_settings import settings_of

LAST_ANSWERS_S = 5
PROBED = {"gateway": 8000, "rollout-server": 8100, "trainer": 8200}


def test_every_pod_is_what_the_restricted_standard_asks_for(
    objects: list[Object], pods: dict[str, Pod]
) -> None:
    (namespace,) = of_kind(objects, "Namespace").values()
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    for pod in pods.values():
        spec = pod.spec
        user = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001}
        profile = {"seccompProfile": {"type": "RuntimeDefault"}}
        assert (user | profile).items() <= spec["securityContext"].items()
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in pod.volumes.values())
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, f"{pod.workload}: {container['name']}"


def test_every_container_has_requests_and_bounded_memory(pods: dict[str, Pod]) -> None:
    """Not a bounded CPU: a container that is throttled answers its probes late."""
    for pod in pods.values():
        for container in pod.containers:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests.keys() >= {"cpu", "memory"}, pod.workload
            assert "memory" in limits
            assert "cpu" not in limits
        for volume in pod.volumes.values():
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], pod.workload
    for name in ("rollout-server", "trainer"):  # shared memory is a part of the container's
        pod = pods[name]
        (path,) = (each["mountPath"] for each in pod.main["volumeMounts"] if each["name"] == "shm")
        assert path == "/dev/shm"  # noqa: S108 - shared memory
        shm = pod.volumes["shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert size(shm["sizeLimit"]) <= size(pod.main["resources"]["limits"]["memory"]) / 2


def size(quantity: str) -> float:
    return float(quantity[:-2]) * 1024.0 ** ("KMGT".index(quantity[-2]) + 1)


def test_a_service_lives_while_live_answers_and_is_ready_while_ready_answers(pods: dict[str, Pod]) -> None:
    """/live of a rollout server answers while its engine boots, and that of a gateway without an engine. What
    ends by itself is not watched, and no probe ends a container that is only slow."""
    for pod in pods.values():
        for container in pod.containers:
            probes = {name for name in container if name.endswith("Probe")}
            watched = pod.runs_on and container is pod.main
            expected = {"startupProbe", "livenessProbe", "readinessProbe"} if watched else set()
            assert probes == expected, f"{pod.workload}: {container['name']}"
    for name, port in PROBED.items():
        container = pods[name].main
        start, live = container["startupProbe"], container["livenessProbe"]
        assert ports(container)["http"] == port
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
        if name != "trainer" or "args" not in container:  # torchrun has pods whose ranks listen on no port
            assert start["httpGet"] == live["httpGet"] == {"path": "/live", "port": "http"}
        assert start["failureThreshold"] * start["periodSeconds"] >= 60
        assert live["failureThreshold"] * live["periodSeconds"] >= 60
        assert live["timeoutSeconds"] <= live["periodSeconds"]


def test_every_service_has_the_time_to_end(
    objects: list[Object], pods: dict[str, Pod], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    settings = settings_of(GatewaySettings, pods["gateway"], objects, tmp_path, monkeypatch)
    given = pods["gateway"].spec["terminationGracePeriodSeconds"]
    assert given >= settings.leave_s + settings.drain_timeout_s + LAST_ANSWERS_S
    assert settings.leave_s >= 5  # until every node and every ingress controller knows that it leaves
    server = settings_of(RolloutServerSettings, pods["rollout-server"], objects, tmp_path, monkeypatch)
    given = pods["rollout-server"].spec["terminationGracePeriodSeconds"]
    assert given >= server.drain_timeout_s + server.stop_timeout_s + LAST_ANSWERS_S
    given, main = pods["trainer"].spec["terminationGracePeriodSeconds"], pods["trainer"].main
    if "args" in main:  # torchrun kills its ranks, by default after 30 s
        (word,) = (each for each in main["args"] if each.startswith("--shutdown-timeout="))
        assert 250 < int(word.partition("=")[2]) <= given - LAST_ANSWERS_S
    assert given >= 60


def test_pods_of_one_kind_spread_over_nodes(pods: dict[str, Pod]) -> None:
    for name in ("gateway", "rollout-server"):
        (spread,) = pods[name].spec["topologySpreadConstraints"]
        assert spread["labelSelector"] == {"matchLabels": {"app.kubernetes.io/name": name}}
        assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_pods_share_a_volume_of_one_node_only_on_that_node(
    overlay: str, objects: list[Object], pods: dict[str, Pod]
) -> None:
    claims = of_kind(objects, "PersistentVolumeClaim")
    shared = {name for name, each in claims.items() if each["spec"]["accessModes"] == ["ReadWriteMany"]}
    if overlay == "fleet":
        assert shared == {"model", "trainer"}
        return
    assert not shared
    for name in ("gateway", "rollout-server"):
        (rule,) = pods[name].spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["labelSelector"]["matchLabels"].items() <= pods["trainer"].labels.items()


def test_gpus_are_asked_for_where_there_are_some(overlay: str, pods: dict[str, Pod]) -> None:
    found = {name: pod.main["resources"]["limits"].get("nvidia.com/gpu") for name, pod in pods.items()}
    expected = {
        "cpu-demo": {},
        "gpu-node": {"rollout-server": 1, "trainer": 1},
        "fleet": {"rollout-server": 1, "trainer": 8},
    }
    assert {name: count for name, count in found.items() if count} == expected[overlay]


def test_only_the_model_job_writes_the_model(pods: dict[str, Pod]) -> None:
    for pod in pods.values():
        mounts = [each for each in pod.main["volumeMounts"] if each["name"] == "model"]
        assert all(mount.get("readOnly", False) is (pod.name != "model") for mount in mounts)
        if mounts and pod.name != "model":
            assert pod.spec["initContainers"][0]["command"][-1].startswith(
                "until [ -e /model/policy/config.json ]"
            )


def test_pods_on_nodes_with_gpus_bear_their_taint(pods: dict[str, Pod]) -> None:
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    on_gpus = {name for name, pod in pods.items() if "nvidia.com/gpu" in pod.main["resources"]["limits"]}
    for name, pod in pods.items():
        rules = pod.spec.get("affinity", {}).get("podAffinity", {})
        beside = {
            each["labelSelector"]["matchLabels"]["app.kubernetes.io/name"]
            for each in rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        }
        assert pod.spec.get("tolerations", []) == ([taint] if on_gpus & {name, *beside} else []), name


def test_nodes_and_gpus_are_counted_alike_everywhere(overlays: dict[str, list[Object]]) -> None:
    spec = named(overlays["fleet"], "StatefulSet", "trainer")["spec"]
    pod = pods_of(overlays["fleet"])["trainer"]
    words = dict(word.removeprefix("--").split("=") for word in pod.main["args"] if "=" in word)
    assert spec["replicas"] == int(words["nnodes"]) == 2
    assert int(words["nproc-per-node"]) == pod.main["resources"]["limits"]["nvidia.com/gpu"]
    assert words["rdzv-endpoint"] == f"trainer-0.{spec['serviceName']}:29400" == f"{FIRST_POD}:29400"


def test_the_trainers_pods_start_and_end_together(overlays: dict[str, list[Object]]) -> None:
    """Only rank 0 becomes ready, so one pod must not wait until another one is."""
    spec = named(overlays["fleet"], "StatefulSet", "trainer")["spec"]
    assert (spec["podManagementPolicy"], spec["updateStrategy"]) == ("Parallel", {"type": "OnDelete"})
