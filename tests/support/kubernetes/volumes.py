"""Volumes of Docker with what a pod mounts, owned and readable as the kubelet makes them for `fsGroup`."""

import base64
import io
import tarfile
from typing import Any

from tests.support.kubernetes.docker import Run, docker
from tests.support.kubernetes.pods import Pod, secret_files
from tests.support.kubernetes.rendered import Object, named

HELPER = "redis:7-alpine"
"""An image that has tar, for the containers that fill volumes."""


FILES_GROUP = 10001
"""`fsGroup` of all pods."""


class Volumes:
    """The volumes of a run. Pods share those of claims."""

    def __init__(self, run: Run, objects: list[Object]) -> None:
        self._run = run
        self._objects = objects
        self._claims: dict[str, str] = {}

    def options(self, pod: Pod) -> dict[str, list[str]]:
        """For each of the pod's volumes the options of docker that mount it, with {path} for the place."""
        return {name: self._options(pod, name, volume) for name, volume in pod.volumes.items()}

    def claim(self, name: str, files: dict[str, tuple[bytes, int]]) -> None:
        """Make the volume of a claim with files, before a pod mounts it."""
        self._claims[name] = self._made(f"claim-{name}", files, 0o2775, FILES_GROUP)

    def _options(self, pod: Pod, name: str, volume: dict[str, Any]) -> list[str]:
        group = pod.spec["securityContext"]["fsGroup"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            bound = volume["emptyDir"]["sizeLimit"].replace("i", "").lower()
            return ["--tmpfs", f"{{path}}:mode=1777,exec,size={bound}"]
        if "persistentVolumeClaim" in volume or "claim" in volume:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", f"{pod.name}-{name}")
            if claim not in self._claims:
                self._claims[claim] = self._made(f"claim-{claim}", {}, 0o2775, group)
            source = self._claims[claim]
        elif "emptyDir" in volume:
            source = self._made(f"{pod.name}-{name}", {}, 0o2777, group)
        else:
            source = self._made(f"{pod.name}-{name}", self._files(pod, name, volume), 0o2755, group)
        return ["--mount", f"type=volume,source={source},target={{path}},volume-nocopy"]

    def _files(self, pod: Pod, name: str, volume: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
        """The content and mode of each file of a ConfigMap or of Secrets."""
        if "configMap" in volume:
            data = named(self._objects, "ConfigMap", volume["configMap"]["name"])["data"]
            mode = volume["configMap"].get("defaultMode", 0o644)
            return {path: (text.encode(), mode) for path, text in data.items()}
        mode = (volume.get("secret") or volume["projected"])["defaultMode"]
        (place,) = (each["mountPath"] for each in pod.main["volumeMounts"] if each["name"] == name)
        found = {}
        for path, source in secret_files(pod, self._objects)[place].items():
            secret, _, key = source.partition("/")
            value = named(self._objects, "Secret", secret)["data"][key]
            found[path] = (base64.b64decode(value), mode)
        return found

    def _made(self, name: str, files: dict[str, tuple[bytes, int]], mode: int, group: int) -> str:
        """A new volume with these files; it belongs to root and to the group."""
        volume = self._run.named(name)
        docker("volume", "create", "--label", self._run.label, volume)
        words = [
            "run",
            "--rm",
            "--interactive",
            "--user",
            "0:0",
            "--network",
            "none",
            "--label",
            self._run.label,
        ]
        words += ["--mount", f"type=volume,source={volume},target=/into,volume-nocopy", "--entrypoint", "sh"]
        script = f"tar -xf - -C /into && chown -R 0:{group} /into && chmod {mode:o} /into"
        docker(*words, HELPER, "-c", script, given=archive(files))
        return volume


def archive(files: dict[str, tuple[bytes, int]]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return written.getvalue()
