"""The settings that a service reads in its pod: its environment, weir.yaml, and the files of its Secrets."""

import base64
import os
import re
from pathlib import Path
from typing import TypeVar

import pytest

from rollout_queue.settings import ServiceSettings
from tests.support.kubernetes.pods import Pod, environment, secret_files
from tests.support.kubernetes.rendered import ROOT, Object, named, of_kind

S = TypeVar("S", bound=ServiceSettings)
STAGES = {
    "gateway": "gateway",
    "rollout-server": "rollout_server",
    "trainer": "trainer",
    "rewards": "rewards",
    "fine-tuning": "fine_tuning",
}
"""The stage of the Dockerfile that is a pod's image."""


def settings_of(kind: type[S], pod: Pod, objects: list[Object], folder: Path, patch: pytest.MonkeyPatch) -> S:
    """The pod's directories are in `folder`. Sets the pod's variables until `patch` is undone."""
    for name in [name for name in os.environ if name.startswith("WEIR_")]:
        patch.delenv(name)
    root = folder / pod.name
    write_settings(pod, objects, root)
    for path, files in secret_files(pod, objects).items():
        write_secrets(root / path.lstrip("/"), files, objects)
    for name, value in (image_variables(STAGES[pod.name]) | environment(pod.main)).items():
        inside = name == "WEIR_CONFIG" or name.endswith("_FILE")
        patch.setenv(name, str(root / value.lstrip("/")) if inside else value)
    return kind()


def image_variables(stage: str) -> dict[str, str]:
    """What the image itself says of Weir's settings."""
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.search(rf"^FROM (?:torch_)?service AS {stage}\n((?:(?!FROM).*\n)*)", text, re.M)
    assert lines is not None
    return dict(re.findall(r"(WEIR_\w+)=(\S+)", lines[1]))


def write_settings(pod: Pod, objects: list[Object], root: Path) -> None:
    """Write the files of the ConfigMaps that the pod mounts, where it mounts them."""
    maps = of_kind(objects, "ConfigMap")
    for mount in pod.main["volumeMounts"]:
        if (volume := pod.volumes[mount["name"]].get("configMap")) is not None:
            target = root / mount["mountPath"].lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            for name, text in maps[volume["name"]]["data"].items():
                (target / name).write_text(text, encoding="utf-8")


def write_secrets(target: Path, files: dict[str, str], objects: list[Object]) -> None:
    """Write files, each of which holds a key of a Secret, named as Secret/key."""
    target.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        secret, _, key = source.partition("/")
        value = named(objects, "Secret", secret)["data"][key]
        (target / name).write_bytes(base64.b64decode(value))
