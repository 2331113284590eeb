"""Every object is valid for the Kubernetes API, and what it refers to is there."""

import copy
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.support.kubernetes.pods import Pod, environment, pods_of, ports
from tests.support.kubernetes.policies import chosen
from tests.support.kubernetes.rendered import ROOT, SOURCE, Object, named, of_kind

VERSIONS = ("1.32", "1.37")
"""The oldest Kubernetes that the manifests are for, and the newest whose schemas are known here."""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_the_schema_of_the_api(objects: list[Object], version: str) -> None:
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
        assert each["metadata"].get("namespace", each["metadata"]["name"]) == "weir"
    broken = copy.deepcopy(named(objects, "Deployment", "gateway"))
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenessProb"):
        kubernetes_validate.validate(broken, version, strict=True)


def test_what_a_pod_mounts_is_there(objects: list[Object], pods: dict[str, Pod]) -> None:
    kinds = {kind: of_kind(objects, kind) for kind in ("ConfigMap", "Secret", "PersistentVolumeClaim")}
    for pod in pods.values():
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= pod.volumes.keys(), pod.workload
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        mounted = {mount["name"] for each in pod.containers for mount in each.get("volumeMounts", [])}
        assert mounted == pod.volumes.keys(), pod.workload
        for volume in pod.volumes.values():
            for kind, name, keys in referred(volume):
                assert name in kinds[kind], f"{pod.workload}: {kind} {name}"
                assert keys <= kinds[kind][name].get("data", {}).keys(), f"{pod.workload}: {name}"


def referred(volume: dict[str, Any]) -> list[tuple[str, str, set[str]]]:
    """Kind, name and keys of what a volume is made of."""
    if "persistentVolumeClaim" in volume:
        return [("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], set())]
    if "configMap" in volume:
        return [("ConfigMap", volume["configMap"]["name"], set())]
    secrets = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
    if "secret" in volume:
        secrets.append(volume["secret"] | {"name": volume["secret"]["secretName"]})
    return [("Secret", each["name"], {item["key"] for item in each.get("items", [])}) for each in secrets]


def test_services_disruption_budgets_and_scaling_choose_pods_that_are_there(
    objects: list[Object], pods: dict[str, Pod]
) -> None:
    for service in of_kind(objects, "Service").values():
        wanted = {"matchLabels": service["spec"]["selector"]}
        behind = [pod for pod in pods.values() if chosen(wanted, pod.labels)]
        assert len(behind) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert ports(behind[0].main)[port["targetPort"]] == port["port"]
    for budget in of_kind(objects, "PodDisruptionBudget").values():
        assert [pod.name for pod in pods.values() if chosen(budget["spec"]["selector"], pod.labels)]
    for scaler in of_kind(objects, "HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in named(objects, target["kind"], target["name"])["spec"]
        assert scaler["spec"]["minReplicas"] > 1
    for ingress in of_kind(objects, "Ingress").values():
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                found = named(objects, "Service", backend["name"])["spec"]["ports"]
                assert backend["port"]["name"] in {port["name"] for port in found}


def test_pods_that_need_a_name_of_their_own_have_a_headless_service(objects: list[Object]) -> None:
    services = of_kind(objects, "Service")
    for each in of_kind(objects, "StatefulSet").values():
        assert each["spec"]["serviceName"] in services
        if each["spec"]["replicas"] > 1:
            service = services[each["spec"]["serviceName"]]["spec"]
            assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_what_services_need_before_they_are_ready_is_reached_before_it_is_ready(
    overlays: dict[str, list[Object]],
) -> None:
    """A gateway is ready once an engine has registered with it: a Service of ready pods stays empty."""
    for objects in overlays.values():
        internal = named(objects, "Service", "gateway-internal")
        assert internal["spec"]["publishNotReadyAddresses"] is True
        public = named(objects, "Service", "gateway")
        assert "publishNotReadyAddresses" not in public["spec"]
        for name, pod in pods_of(objects).items():
            address = environment(pod.main).get("WEIR_GATEWAY_URL")
            expected = "http://gateway:8000" if name == "agent" else "http://gateway-internal:8000"
            assert address in (None, expected), name


def test_redis_has_the_settings_of_the_queue(objects: list[Object]) -> None:
    for name in ("redis.conf", "start-redis.sh"):
        original = (ROOT / "queue" / name).read_bytes()
        assert (SOURCE / "base" / "redis" / name).read_bytes() == original
    (settings,) = (each for name, each in of_kind(objects, "ConfigMap").items() if name.startswith("redis-"))
    assert settings["data"]["redis.conf"] == (ROOT / "queue" / "redis.conf").read_text(encoding="utf-8")


@pytest.mark.parametrize("service", ["gateway", "rollout-server", "trainer"])
def test_a_service_is_upgraded_alone_by_its_label(
    objects: list[Object], pods: dict[str, Pod], service: str
) -> None:
    """`kubectl apply -l` sends the workload with its settings, and nothing of another service."""
    label = "app.kubernetes.io/name"
    sent = [each for each in objects if each["metadata"].get("labels", {}).get(label) == service]
    assert list(pods_of(sent)) == [service]
    settings = pods[service].volumes["settings"]["configMap"]["name"]
    assert settings in of_kind(sent, "ConfigMap")


def test_no_key_is_in_git() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "deploy/kubernetes/secrets"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {Path(line).name for line in tracked.stdout.splitlines()}
    assert names <= {".gitignore", "kustomization.yaml"}
    ignored = (SOURCE / "secrets" / ".gitignore").read_text(encoding="utf-8").split()
    assert ignored == ["*", "!.gitignore", "!kustomization.yaml"]


def test_keys_are_made_once_and_printed_once(tmp_path: Path) -> None:
    first = made(tmp_path)
    files = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    keys, password = {"admin_keys", "client_keys"}, {"redis_password", "redis_password.conf", "redis_url"}
    services = {"rollout_server_key", "trainer_key", "engine_key"}
    assert files.keys() == keys | password | services
    assert not any(files[each].strip() in first for each in services)
    assert all(f"a new {role} key: {files[f'{role}_keys']}" in first for role in ("client", "admin"))
    assert files["redis_password"] not in first
    assert len(files["redis_password"]) == 64
    assert files["redis_url"] == f"redis://:{files['redis_password']}@redis:6379/0"
    assert files["redis_password.conf"] == f"requirepass {files['redis_password']}\n"
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    assert made(tmp_path) == ""
    assert files == {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}


def made(folder: Path) -> str:
    command = [str(SOURCE / "make-secrets"), str(folder)]
    assert os.access(command[0], os.X_OK)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_only_operators_read_is_no_path_of_the_public_ingress(overlays: dict[str, list[Object]]) -> None:
    found = named(overlays["fleet"], "Ingress", "gateway-operators")
    paths = [each["path"] for each in found["spec"]["rules"][0]["http"]["paths"]]
    assert paths == ["/metrics", "/docs", "/openapi.json"]
    asked = found["metadata"]["annotations"]["nginx.ingress.kubernetes.io/auth-url"]
    assert asked == "http://gateway.weir.svc.cluster.local:8000/admin/policies/serving"


def test_another_model_is_another_job_and_no_volume_takes_two(
    overlays: dict[str, list[Object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {pods_of(objects)["model"].workload for objects in overlays.values()}
    assert names == {"Job/model-demo", "Job/model-qwen3-1-7b", "Job/model-qwen3-8b"}
    script = runpy.run_path(str(SOURCE / "hub-model" / "fetch_model.py"))
    fetch = script["main"]
    fetched: list[str] = []

    def download(repository: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        fetched.append(repository)
        local_dir.mkdir()
        (local_dir / "config.json").touch()

    fetch.__globals__.update({"MODEL_DIR": tmp_path, "snapshot_download": download})
    fetch("Qwen/Qwen3-1.7B")
    fetch("Qwen/Qwen3-1.7B")
    assert "is there" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"is Qwen/Qwen3-1.7B@main, not Qwen/Qwen3-8B@main: train another"):
        fetch("Qwen/Qwen3-8B")
    assert fetched == ["Qwen/Qwen3-1.7B"]
