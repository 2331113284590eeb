"""The components, added to the overlay `fleet`: valid, closed, and in keeping with what they are added to."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fine_tuning.settings import FineTuningSettings
from reward_service.settings import RewardSettings
from tests.support.kubernetes.pods import Pod, environment, pods_of
from tests.support.kubernetes.policies import Network, Peer, pairs
from tests.support.kubernetes.rendered import ROOT, SOURCE, Object, named, of_kind, rendered
from tests.support.kubernetes.service_settings import settings_of

COMPONENTS = ("backup", "fine-tuning", "prometheus-operator", "rewards", "pull-secret")
OF_THE_OPERATOR = {"PodMonitor", "PrometheusRule"}


@pytest.fixture(scope="module")
def objects(manifests: Path) -> list[Object]:
    folder = manifests / "overlays" / "with-components"
    folder.mkdir()
    added = [f"../../components/{each}" for each in COMPONENTS]
    document = {"resources": ["../fleet"], "namespace": "weir", "components": added}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return rendered(folder)


def of_job(objects: list[Object]) -> Pod:
    """The pod of the backup."""
    template = named(objects, "CronJob", "backup")["spec"]["jobTemplate"]["spec"]["template"]
    return Pod("CronJob/backup", template["metadata"]["labels"], template["spec"], {})


def test_every_object_is_valid(objects: list[Object]) -> None:
    assert {each.name for each in (SOURCE / "components").iterdir()} == set(COMPONENTS)
    for each in objects:
        if each["kind"] not in OF_THE_OPERATOR:
            kubernetes_validate.validate(each, "1.32", strict=True)


def test_every_pod_is_closed_and_has_the_secret_of_the_registry(objects: list[Object]) -> None:
    for pod in [*pods_of(objects).values(), of_job(objects)]:
        assert pod.spec["imagePullSecrets"] == [{"name": "registry"}], pod.workload
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["automountServiceAccountToken"] is False
        for container in pod.containers:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_a_backup_reads_what_the_trainer_writes(objects: list[Object]) -> None:
    backup, trainer = of_job(objects), pods_of(objects)["trainer"]
    assert environment(backup.main).items() <= environment(trainer.main).items()
    mounts = [each for each in backup.main["volumeMounts"] if each["name"] == "trainer"]
    assert mounts == [each for each in trainer.main["volumeMounts"] if each["name"] == "trainer"]
    claims = of_kind(objects, "PersistentVolumeClaim")
    for volume in backup.spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_components_reach_what_they_need_and_nothing_else(objects: list[Object]) -> None:
    pods = pods_of(objects) | {"backup": of_job(objects)}
    peers = {name: Peer(name, pod.labels, "weir", {}) for name, pod in pods.items()}
    ports = {"redis": 6379, "gateway": 8000, "rollout-server": 8100, "trainer": 8200}
    ports |= {"rewards": 8300, "fine-tuning": 8400}
    network = Network("weir", list(of_kind(objects, "NetworkPolicy").values()))
    targets = {name: (peers[name], [port]) for name, port in ports.items()}
    found = pairs(network, [peers["backup"], peers["rewards"], peers["fine-tuning"]], targets)
    assert found == {"backup > redis:6379", "rewards > gateway:8000", "fine-tuning > gateway:8000"}
    prometheus = Peer("prometheus", {}, "monitoring", {})
    assert {"prometheus > rewards:8300", "prometheus > fine-tuning:8400"} <= pairs(
        network, [prometheus], targets
    )


def test_the_reward_service_accepts_its_settings(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(RewardSettings, pods_of(objects)["rewards"], objects, tmp_path, monkeypatch)
    assert (settings.host, settings.port, settings.gateway_url) == ("0.0.0.0", 8300, "http://gateway:8000")
    assert [rule.name for rule in settings.rules] == ["sums"]
    assert settings.gateway_headers["authorization"].startswith("Bearer weir-admin-")


def test_the_service_for_fine_tuning_jobs_accepts_its_settings_and_keeps_its_jobs(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = pods_of(objects)["fine-tuning"]
    settings = settings_of(FineTuningSettings, pod, objects, tmp_path, monkeypatch)
    assert (settings.host, settings.port, settings.gateway_url) == ("0.0.0.0", 8400, "http://gateway:8000")
    assert (settings.gateway_key or "").startswith("weir-admin-")
    (kept,) = [each for each in pod.spec["volumes"] if "persistentVolumeClaim" in each]
    mounts = {each["name"]: each["mountPath"] for each in pod.main["volumeMounts"]}
    assert mounts[kept["name"]] == str(settings.directory)


def test_the_operator_gets_the_rules_and_the_jobs_of_prometheus(objects: list[Object]) -> None:
    rules = ROOT / "deploy" / "observe" / "prometheus" / "rules.yml"
    assert named(objects, "PrometheusRule", "weir")["spec"] == yaml.safe_load(rules.read_text())
    monitor = named(objects, "PodMonitor", "weir")["spec"]
    document = yaml.safe_load((SOURCE / "monitoring" / "prometheus.yaml").read_text())
    given = document["scrape_configs"][0]["relabel_configs"]
    labels = {"service", "job"}  # the operator sets the others itself
    expected = [in_camel_case(each) for each in given if each.get("target_label") in labels]
    endpoints = monitor["podMetricsEndpoints"]
    assert [(each["port"], each["relabelings"]) for each in endpoints] == [
        ("http", expected),
        ("engine", expected),
    ]


def in_camel_case(rule: dict[str, Any]) -> dict[str, Any]:
    return {re.sub(r"_(.)", lambda found: found[1].upper(), name): value for name, value in rule.items()}
