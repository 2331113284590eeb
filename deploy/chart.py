"""`make chart`: the Helm chart, made of what kustomize renders. Two runs give the same bytes.

overlays with all components ─▶ kubectl kustomize ─▶ overlays/NAME.json    objects, as data for the templates
chart/values.schema.yaml ─▶ values.yaml, values.schema.json
chart/templates ─▶ the same files                            they put values into the objects
make-secrets, secrets/ ─▶ the same files                     keys are made outside of the chart
all of these ─▶ weir-chart-VERSION.tgz

The chart has no namespace and no Secret. Names of ConfigMaps bear no hash: annotations of the pods do.
"""

import argparse
import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu-demo", "gpu-node", "fleet")
COMPONENTS = ("rewards", "fine-tuning", "backup", "prometheus-operator")
"""`pull-secret` changes objects: in the chart, that is a value."""
Object = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the archive")
    out = parser.parse_args().out
    if shutil.which("kubectl") is None:
        raise SystemExit("kubectl is missing (on Debian: kubernetes-client): it renders what is in the chart")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"weir-chart-{version}.tgz"
    archive.write_bytes(packed(chart(version)))
    print(archive)


def chart(version: str) -> dict[str, bytes]:
    """The content of each file of the chart."""
    given = SOURCE / "chart"
    schema = yaml.safe_load((given / "values.schema.yaml").read_text(encoding="utf-8"))
    about = {
        "apiVersion": "v2",
        "name": "weir",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.32.0-0",
        "description": "Trains a language model from live traffic of agents",
    }
    files = {
        "Chart.yaml": yaml.safe_dump(about, sort_keys=False),
        "values.yaml": "\n".join([*value_lines(schema["properties"]), ""]),
        "values.schema.json": json.dumps(schema, indent=1),
    }
    files |= {f"overlays/{name}.json": json.dumps(found, indent=1) for name, found in rendered().items()}
    content = {name: text.encode() for name, text in files.items()}
    kept = [*sorted((given / "templates").iterdir()), SOURCE / "secrets" / "kustomization.yaml"]
    content |= {f"{path.parent.name}/{path.name}": path.read_bytes() for path in kept}
    return content | {"make-secrets": (SOURCE / "make-secrets").read_bytes()}


def value_lines(properties: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """values.yaml: each value with its default, below its sentence."""
    indent = "  " * depth
    for name, schema in properties.items():
        inner = "properties" in schema and "default" not in schema
        if inner or "default" in schema:
            yield from [""] * (not depth)
            yield from textwrap.wrap(
                schema["description"],
                width=100,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
            )
            yield f"{indent}{name}:" + ("" if inner else f" {json.dumps(schema['default'])}")
        if inner:
            yield from value_lines(schema["properties"], depth + 1)


def rendered() -> dict[str, dict[str, list[Object]]]:
    """For each overlay its own objects, as `overlay`, and what each component adds to them."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kubernetes"
        shutil.copytree(SOURCE, copy)
        for path in copy.rglob("kustomization.yaml"):
            without_hashes_and_keys(path)
        part_of = {}
        for component in COMPONENTS:
            for each in kustomized(copy / "alone", {"components": [f"../components/{component}"]}):
                part_of[identity(each)] = component
        for overlay in OVERLAYS:
            folder_of_it = copy / "overlays" / overlay
            document = yaml.safe_load((folder_of_it / "kustomization.yaml").read_text(encoding="utf-8"))
            added = {"components": [f"../../components/{component}" for component in COMPONENTS]}
            found[overlay] = {name: list[Object]() for name in ("overlay", *COMPONENTS)}
            for each in kustomized(folder_of_it, document | added):
                found[overlay][part_of.get(identity(each), "overlay")].append(each)
    return found


def identity(each: Object) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def without_hashes_and_keys(path: Path) -> None:
    """Change a kustomization.yaml: it names no Secrets, and its ConfigMaps keep their names."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "configMapGenerator" in document:
        document["generatorOptions"] = {"disableNameSuffixHash": True}
    document["resources"] = [each for each in document.get("resources", []) if each != "../secrets"]
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def kustomized(folder: Path, document: Mapping[str, Any]) -> list[Object]:
    """The objects of a kustomization, without the namespace: it is the release's."""
    folder.mkdir(exist_ok=True)
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [shutil.which("kubectl") or "kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"kustomize cannot render {document}: {done.stderr}")
    return [each for each in yaml.safe_load_all(done.stdout) if each["kind"] != "Namespace"]


def packed(files: Mapping[str, bytes]) -> bytes:
    """A tar archive, compressed, in the folder that the chart is named after."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    written = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=written, mode="wb", mtime=epoch) as pressed,
        tarfile.open(fileobj=pressed, mode="w") as archive,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(f"weir/{name}")
            entry.size, entry.mtime = len(files[name]), epoch
            entry.mode = 0o755 if name == "make-secrets" else 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return written.getvalue()


if __name__ == "__main__":
    main()
