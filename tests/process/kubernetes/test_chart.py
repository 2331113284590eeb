"""The Helm chart: the real Helm renders what kustomize renders, and each value changes what it says alone."""

import copy
import fnmatch
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from tests.support.kubernetes.helm import Helm, Refused, why_no_helm
from tests.support.kubernetes.pods import pods_of
from tests.support.kubernetes.rendered import (
    OVERLAYS,
    ROOT,
    SOURCE,
    Object,
    of_kind,
    rendered,
    why_not_rendered,
)
from tests.support.kubernetes.service_settings import settings_of
from trainer_service.settings import TrainerSettings

SCHEMA: dict[str, Any] = yaml.safe_load((SOURCE / "chart" / "values.schema.yaml").read_text("utf-8"))
COMPONENTS = ["rewards", "fine-tuning", "backup", "prometheus-operator"]
FLEET: dict[str, Any] = {"overlay": "fleet", "components": COMPONENTS}
OF_THE_OPERATOR = {"PodMonitor", "PrometheusRule"}
TEMPLATES = {
    "gateway": "Deployment/gateway spec.template",
    "rolloutServer": "Deployment/rollout-server spec.template",
    "trainer": "StatefulSet/trainer spec.template",
    "redis": "StatefulSet/redis spec.template",
    "model": "Job/model spec.template",
    "rewards": "Deployment/rewards spec.template",
    "fineTuning": "Deployment/fine-tuning spec.template",
    "backup": "CronJob/backup spec.jobTemplate.spec.template",
}
"""Where the pods of a section of values are described."""
TOLERATION = {"key": "gpu", "operator": "Exists"}
OF_A_POD: dict[str, tuple[Any, list[str]]] = {
    "image": ("there/x:3", ["{pod}.spec.*ontainers.*.image = there/x:3"]),
    "replicas": (5, ["{of}.replicas = 5", "HorizontalPodAutoscaler/{name} gone"]),
    "minReplicas": (4, ["HorizontalPodAutoscaler/{name} spec.minReplicas = 4"]),
    "maxReplicas": (20, ["HorizontalPodAutoscaler/{name} spec.maxReplicas = 20"]),
    "resources": (
        {"limits": {"memory": "3Gi"}},
        ["{pod}.spec.containers.{name}.resources.limits.memory = 3Gi"],
    ),
    "nodeSelector": ({"zone": "b"}, ["{pod}.spec.nodeSelector.zone = b"]),
    "tolerations": ([TOLERATION], ["{pod}.spec.tolerations.0.*"]),
    "terminationGracePeriodSeconds": (900, ["{pod}.spec.terminationGracePeriodSeconds = 900"]),
    "settings": (
        {"port": 8999},
        [
            "ConfigMap/weir-{name} data.weir.yaml.*.port = 8999",
            "{pod}.metadata.annotations.checksum/settings = *",
        ],
    ),
}
"""What each value of a section of pods is set to, and patterns of the lines that it changes (`changes`)."""
OTHERS: dict[str, tuple[Any, list[str]]] = {
    "overlay": ("fleet", []),
    "components": (COMPONENTS, []),
    "labels": ({"team": "a"}, ["* metadata.labels.team = a", "*.template.metadata.labels.team = a"]),
    "annotations": (
        {"team": "a"},
        ["* metadata.annotations.team = a", "*.template.metadata.annotations.team = a"],
    ),
    "images.registry": (
        "there:5000/w",
        [
            f"*.spec.*ontainers.*.image = there:5000/w/weir-{name}:1"
            for name in ("gateway", "rollout-server-cuda", "trainer-cuda", "rewards", "fine-tuning")
        ],
    ),
    "images.tag": ("2", ["*.spec.*ontainers.*.image = registry.example.com/weir-*:2"]),
    "images.pullPolicy": ("Always", ["*.spec.*ontainers.*.imagePullPolicy = Always"]),
    "images.pullSecrets": (
        ["registry"],
        [f"{pod}.spec.imagePullSecrets.registry.name = registry" for pod in TEMPLATES.values()],
    ),
    "secrets.keys": ("mine", ["*.spec.volumes.secrets.*.name = mine", "*.secrets.secret.secretName = mine"]),
    "secrets.serviceKeys": (
        "mine",
        [
            "Deployment/gateway spec.template.spec.volumes.secrets.projected.sources.1.secret.name = mine",
            "StatefulSet/trainer spec.template.spec.volumes.secrets.projected.sources.1.secret.name = mine",
            "Deployment/rollout-server spec.template.spec.volumes.secrets.secret.secretName = mine",
        ],
    ),
    "secrets.redis": (
        "mine",
        [
            "Deployment/gateway spec.template.spec.volumes.secrets.projected.sources.2.secret.name = mine",
            "StatefulSet/trainer spec.template.spec.volumes.secrets.projected.sources.2.secret.name = mine",
            "CronJob/backup *.volumes.secrets.projected.sources.1.secret.name = mine",
            "StatefulSet/redis spec.template.spec.volumes.secrets.secret.secretName = mine",
        ],
    ),
    "model.name": ("a/b", ["Job/model spec.template.spec.containers.model.args.0 = a/b"]),
    "model.revision": (
        "v2",
        [
            "Job/model spec.template.spec.containers.model.args.0 = a/b",
            "Job/model spec.template.spec.containers.model.args.1 = v2",
        ],
    ),
    "model.tokenSecret": ("hub", ["Job/model spec.template.spec.containers.model.env.HF_TOKEN.*"]),
    "trainer.image": (
        "there/x:3",
        [f"{TEMPLATES[each]}.spec.*ontainers.*.image = there/x:3" for each in ("trainer", "model", "backup")],
    ),
    "trainer.nodes": (
        4,
        [
            "StatefulSet/trainer spec.replicas = 4",
            "StatefulSet/trainer spec.template.spec.containers.trainer.args.0 = --nnodes=4",
        ],
    ),
    "trainer.gpus": (
        2,
        [
            "StatefulSet/trainer spec.template.spec.containers.trainer.resources.limits.nvidia.com/gpu = 2",
            "StatefulSet/trainer spec.template.spec.containers.trainer.args.1 = --nproc-per-node=2",
        ],
    ),
    "backup.schedule": ("5 4 * * *", ["CronJob/backup spec.schedule = 5 4 ? ? ?"]),
    "storage.className": (
        "fast",
        [
            "StatefulSet/redis spec.volumeClaimTemplates.0.spec.storageClassName = fast",
            "PersistentVolumeClaim/backups spec.storageClassName = fast",
            "PersistentVolumeClaim/fine-tuning spec.storageClassName = fast",
        ],
    ),
    "storage.sharedClassName": (
        "nfs",
        [
            "PersistentVolumeClaim/model spec.storageClassName = nfs",
            "PersistentVolumeClaim/trainer spec.storageClassName = nfs",
        ],
    ),
    "storage.sizes.redis": (
        "7Gi",
        ["StatefulSet/redis spec.volumeClaimTemplates.0.spec.resources.requests.storage = 7Gi"],
    ),
    "ingress.enabled": (False, ["Ingress/gateway gone", "Ingress/gateway-operators gone"]),
    "ingress.host": (
        "a.b",
        ["Ingress/gateway* spec.rules.0.host = a.b", "Ingress/gateway* spec.tls.0.hosts.0 = a.b"],
    ),
    "ingress.tlsSecret": ("mine", ["Ingress/gateway* spec.tls.0.secretName = mine"]),
    "ingress.className": ("inside", ["Ingress/gateway* spec.ingressClassName = inside"]),
    "ingress.annotations": ({"a/b": "c"}, ["Ingress/gateway* metadata.annotations.a/b = c"]),
}
REFUSED: dict[str, dict[str, Any]] = {
    "additional properties 'replica' not allowed": {"gateway": {"replica": 2}},
    "'/gateway/replicas': got string": {"gateway": {"replicas": "two"}},
    "'/overlay': value must be one of": {"overlay": "gpu"},
    "'/components/0': value must be one of": {"components": ["reward"]},
    "'/gateway/resources': additional properties 'limit'": {"gateway": {"resources": {"limit": {}}}},
    "'/secrets/keys': minLength": {"secrets": {"keys": ""}},
    "'/model/name'": {"overlay": "fleet", "model": {"name": "Qwen3"}},
    "trainer.nodes is a value of the overlay fleet, and overlay is cpu-demo": {"trainer": {"nodes": 2}},
    "ingress.host is a value of the overlay fleet": {"overlay": "gpu-node", "ingress": {"host": "a.b"}},
    "model.name is no value of the overlay cpu-demo": {"model": {"name": "a/b"}},
    "model.revision needs model.name": {"overlay": "fleet", "model": {"revision": "b"}},
    "fineTuning.settings needs fine-tuning in components": {"fineTuning": {"settings": {"concurrency": 1}}},
    "storage.sizes.backups needs backup in components": {"storage": {"sizes": {"backups": "1Gi"}}},
    "gateway.replicas takes the place of": {
        "overlay": "fleet",
        "gateway": {"replicas": 2, "maxReplicas": 4},
    },
}


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The values of a schema by their dotted names."""
    for name, inner in schema["properties"].items():
        if "default" in inner:
            yield path + name, inner
        elif "properties" in inner:
            yield from leaves(inner, f"{path}{name}.")


VALUES = dict(leaves(SCHEMA))


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the chart, unpacked."""
    if (reason := why_not_rendered()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("chart")
    with tarfile.open(made(folder)) as files:
        files.extractall(folder, filter="data")
    return folder / "weir"


def made(folder: Path) -> Path:
    command = [sys.executable, str(ROOT / "deploy" / "chart.py"), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = folder.glob("*.tgz")
    return archive


@pytest.fixture(scope="module")
def helm(chart: Path) -> Iterator[Helm]:
    if (reason := why_no_helm()) is not None:
        pytest.skip(reason)
    with Helm(chart) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(helm: Helm) -> list[Object]:
    """What is changed to see what a value changes."""
    return helm.render(FLEET)


def changes(before: list[Object], after: list[Object]) -> set[str]:
    """What differs, one line for each field: `Kind/name path = value`, and `Kind/name gone`."""
    old, new = ({named: dict(fields("", each)) for named, each in by_name(of)} for of in (before, after))
    found = {f"{name} gone" for name in old.keys() - new.keys()}
    for name, now in new.items():
        was = old.get(name, {})
        found |= {f"{name} {path} = {now[path]}" for path in now if now[path] != was.get(path)}
        found |= {f"{name} {path} gone" for path in was.keys() - now.keys()}
    return found


def by_name(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """The objects by kind and name. The name of the Job follows from all else in it, and is left out."""
    for each in copy.deepcopy(objects):
        if each["kind"] == "Job":
            each["metadata"]["name"] = "model"
        yield f"{each['kind']}/{each['metadata']['name']}", each


def fields(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each field with its path, also those in weir.yaml. Things that have names are named, others counted."""
    if path == "data.weir.yaml":
        value = yaml.safe_load(value)
    if isinstance(value, list):
        names = [each.get("name") if isinstance(each, dict) else None for each in value]
        value = {
            name or str(index): each for index, (name, each) in enumerate(zip(names, value, strict=True))
        }
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from fields(f"{path}.{name}" if path else name, inner)
    else:
        yield path, value


def as_kustomize_has_it(objects: list[Object]) -> dict[str, Object]:
    """Without what the chart adds: hashes in annotations instead of names, and that volumes stay."""
    found = dict(by_name(objects))
    for each in found.values():
        of_pods = each.get("spec", {}).get("template", {}).get("metadata", {})
        for metadata in (each["metadata"], of_pods):
            annotations = metadata.get("annotations", {})
            annotations.pop("checksum/settings", None)
            annotations.pop("helm.sh/resource-policy", None)
            if not annotations:
                metadata.pop("annotations", None)
    return found


def without_hashes(objects: list[Object]) -> list[Object]:
    """Kustomize's objects with names of ConfigMaps as they are written, without keys and the namespace."""
    text = yaml.safe_dump_all(each for each in objects if each["kind"] not in ("Secret", "Namespace"))
    for name in of_kind(objects, "ConfigMap"):
        if (hashed := re.fullmatch(r"(.+)-[a-z0-9]{10}", name)) is not None:
            text = text.replace(f"name: {name}\n", f"name: {hashed[1]}\n")
    return list(yaml.safe_load_all(text))


def test_each_value_has_a_sentence_and_a_default_that_fits(chart: Path) -> None:
    text = (chart / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    schema_of_helm = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    assert jsonschema_rs.is_valid(schema_of_helm, defaults)
    assert not jsonschema_rs.is_valid(schema_of_helm, {"gateway": {"replica": 1}})
    lines = text.splitlines()
    for before, line in pairwise(lines):
        assert not re.match(r" *\w+:", line) or before.strip().startswith("# "), line
    for name, schema in VALUES.items():
        value = defaults
        for part in name.split("."):
            value = value[part]
        assert value == schema["default"], name
        assert schema["description"].endswith("."), name


def test_the_chart_brings_no_key_and_what_makes_them(chart: Path, tmp_path: Path) -> None:
    assert not [each for each in chart.rglob("*") if re.search(r"_keys?$|redis_", each.name)]
    shutil.copytree(chart, tmp_path / "weir")
    made_here = subprocess.run(
        [tmp_path / "weir" / "make-secrets"], capture_output=True, text=True, check=True
    )
    assert "a new client key: weir-client-" in made_here.stdout
    secrets = of_kind(rendered(tmp_path / "weir" / "secrets"), "Secret")
    assert secrets.keys() == {
        VALUES[f"secrets.{each}"]["default"] for each in ("keys", "serviceKeys", "redis")
    }


@pytest.mark.long
@pytest.mark.parametrize("components", [[], COMPONENTS], ids=["alone", "with-components"])
@pytest.mark.parametrize("name", OVERLAYS)
def test_helm_renders_what_kustomize_renders(
    helm: Helm, manifests: Path, name: str, components: list[str]
) -> None:
    folder = manifests / "overlays" / f"chart-{name}-{len(components)}"
    shutil.copytree(manifests / "overlays" / name, folder)
    document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    document["components"] = [f"../../components/{each}" for each in components]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document))
    expected = dict(by_name(without_hashes(rendered(folder))))
    found = as_kustomize_has_it(helm.render({"overlay": name, "components": components}))
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        assert found[key] == each, key


@pytest.mark.long
@pytest.mark.parametrize("value", sorted(VALUES.keys() - {"overlay", "components"}))
def test_a_value_changes_what_it_says_and_nothing_else(helm: Helm, fleet: list[Object], value: str) -> None:
    given, patterns = case(value)
    for part in reversed(value.split(".")):
        given = {part: given}
    if value == "model.revision":
        given["model"]["name"] = "a/b"
    after = helm.render(FLEET | given)
    lines = changes(fleet, after)
    assert not [line for line in lines if not any(fnmatch.fnmatchcase(line, each) for each in patterns)]
    assert not [each for each in patterns if not fnmatch.filter(lines, each)], lines
    for each in after:
        if each not in fleet and each["kind"] not in OF_THE_OPERATOR:
            kubernetes_validate.validate(each, "1.32", strict=True)


def case(value: str) -> tuple[Any, list[str]]:
    """What a value is set to, and patterns of the lines that it changes."""
    if value in OTHERS:
        return OTHERS[value]
    section, _, field = value.rpartition(".")
    if section == "storage.sizes":
        claim = {"fineTuning": "fine-tuning"}.get(field, field)
        return "7Gi", [f"PersistentVolumeClaim/{claim} spec.resources.requests.storage = 7Gi"]
    pod = TEMPLATES[section]
    kind_and_name = pod.split(" ")[0]
    name = kind_and_name.split("/")[1]
    given, patterns = OF_A_POD[field]
    return given, [each.format(pod=pod, of=f"{kind_and_name} spec", name=name) for each in patterns]


@pytest.mark.long
def test_labels_reach_every_object_and_pod_and_replace_none(helm: Helm, fleet: list[Object]) -> None:
    own = {"app.kubernetes.io/part-of": "other", "app.kubernetes.io/name": "other"}
    for each in helm.render(FLEET | {"labels": {"team": "a"}}):
        metadata = [each["metadata"]]
        spec = each.get("spec", {}).get("jobTemplate", each).get("spec", {})
        if "template" in spec:
            metadata.append(spec["template"]["metadata"])
        assert [found["labels"]["team"] for found in metadata] == ["a"] * len(metadata)
    changed = changes(fleet, helm.render(FLEET | {"labels": own}))
    assert not [line for line in changed if ".template." in line]


@pytest.mark.long
@pytest.mark.parametrize("sentence", REFUSED)
def test_a_wrong_value_is_refused_with_a_sentence(helm: Helm, sentence: str) -> None:
    with pytest.raises(Refused, match=re.escape(sentence)):
        helm.render(REFUSED[sentence])


@pytest.mark.long
def test_a_release_is_in_its_own_namespace_and_has_no_secret(helm: Helm) -> None:
    for name in OVERLAYS:
        found = helm.render({"overlay": name, "components": COMPONENTS}, namespace="other")
        assert {each["metadata"].get("namespace") for each in found} == {"other"}
        assert not {"Secret", "Namespace"} & {each["kind"] for each in found}
        assert "weir.svc" not in str(found)


@pytest.mark.long
def test_a_changed_job_is_another_and_pods_restart_for_their_own_settings(helm: Helm) -> None:
    def job(values: dict[str, Any]) -> str:
        (name,) = of_kind(helm.render(values), "Job")
        return name

    assert job({}) == job({"gateway": {"image": "there/x:3"}}) != job({"trainer": {"image": "there/x:3"}})
    text = of_kind(helm.render({}), "ConfigMap")["weir-gateway"]["data"]
    pod = pods_of(helm.render({}))["gateway"]
    annotations = of_kind(helm.render({}), "Deployment")[pod.name]["spec"]["template"]["metadata"][
        "annotations"
    ]
    packed = json.dumps(text, separators=(",", ":"))
    assert annotations == {"checksum/settings": hashlib.sha256(packed.encode()).hexdigest()}


@pytest.mark.long
def test_a_service_accepts_its_settings_merged_over_those_of_the_overlay(
    helm: Helm, overlays: dict[str, list[Object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"optimizer": {"lr": 1e-07, "warmup_steps": 0}, "algorithm": {"max_tokens": 2_000_000}}
    objects = helm.render({"trainer": {"settings": given}})
    objects += of_kind(overlays["cpu-demo"], "Secret").values()
    found = settings_of(TrainerSettings, pods_of(objects)["trainer"], objects, tmp_path, monkeypatch)
    assert (found.optimizer.lr, found.optimizer.warmup_steps) == (1e-07, 0)
    assert (found.algorithm.max_tokens, found.algorithm.min_live_rows) == (2_000_000, 32)


@pytest.mark.long
def test_helm_finds_no_fault_in_the_chart_and_reads_its_archive(helm: Helm, tmp_path: Path) -> None:
    for name in OVERLAYS:
        report = helm.lint({"overlay": name, "components": COMPONENTS})
        assert [each["error"] for each in report["messages"]] == ["icon is recommended"]
        assert not report["errors"]
    archives = [made(tmp_path / name) for name in ("one", "other")]
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with Helm(archives[0]) as packed:
        assert packed.render({}) == helm.render({})
