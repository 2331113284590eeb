"""The overlays of deploy/kubernetes as kubectl renders them, in a copy of the folder with keys of its own."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu-node", "fleet")
Object = dict[str, Any]


def why_not_rendered() -> str | None:
    """Why nothing can be rendered here; None if it can."""
    return None if shutil.which("kubectl") else "kubectl is missing (on Debian: kubernetes-client)"


def copied(folder: Path) -> Path:
    """A copy of deploy/kubernetes in `folder`, with new keys."""
    copy = folder / "kubernetes"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("*_keys", "redis_*"))
    subprocess.run([copy / "make-secrets"], check=True, stdout=subprocess.DEVNULL)
    return copy


def rendered(kustomization: Path) -> list[Object]:
    """All objects of one folder with a kustomization.yaml."""
    command = ["kubectl", "kustomize", str(kustomization)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}
