"""The pods that rendered objects describe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.kubernetes.rendered import Object

WORKLOADS = ("Deployment", "StatefulSet", "Job")
FIRST_POD = "trainer-0.trainer-ranks"
"""The name of the first pod of the fleet's trainer."""


@dataclass(frozen=True)
class Pod:
    """One pod of a workload."""

    workload: str
    """The workload's kind and name: Deployment/gateway."""
    labels: dict[str, str]
    spec: dict[str, Any]
    claims: dict[str, Any]
    """The claims that a StatefulSet makes for each of its pods, by the name of their volume."""

    @property
    def name(self) -> str:
        return self.labels["app.kubernetes.io/name"]

    @property
    def runs_on(self) -> bool:
        """Whether it is to run until somebody ends it."""
        return not self.workload.startswith("Job/")

    @property
    def main(self) -> dict[str, Any]:
        """The container that does the work."""
        (container,) = self.spec["containers"]
        found: dict[str, Any] = container
        return found

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        """The sources of the volumes, those of the pod's own claims included."""
        own: dict[str, dict[str, Any]] = {name: {"claim": name} for name in self.claims}
        return own | {volume["name"]: volume for volume in self.spec.get("volumes", [])}


def pods_of(objects: list[Object]) -> dict[str, Pod]:
    """The pods by the name in their labels, which is unique in each overlay."""
    found = {}
    for each in objects:
        if each["kind"] in WORKLOADS:
            name, template = each["metadata"]["name"], each["spec"]["template"]
            claims = {
                claim["metadata"]["name"]: claim for claim in each["spec"].get("volumeClaimTemplates", [])
            }
            pod = Pod(f"{each['kind']}/{name}", template["metadata"]["labels"], template["spec"], claims)
            found[pod.name] = pod
    return found


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container.get("env", [])}


def ports(container: Mapping[str, Any]) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container.get("ports", [])}


def secret_files(pod: Pod, objects: list[Object]) -> dict[str, dict[str, str]]:
    """For each mount path of Secrets: its files, each with what it holds, as Secret/key."""
    keys = {each["metadata"]["name"]: list(each["data"]) for each in objects if each["kind"] == "Secret"}
    found = {}
    for mount in pod.main.get("volumeMounts", []):
        volume = pod.volumes[mount["name"]]
        sources = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
        sources += (
            [{"name": volume["secret"]["secretName"], **volume["secret"]}] if "secret" in volume else []
        )
        if sources:
            found[mount["mountPath"]] = {
                item["path"]: f"{source['name']}/{item['key']}"
                for source in sources
                for item in source.get("items") or [{"key": key, "path": key} for key in keys[source["name"]]]
            }
    return found
