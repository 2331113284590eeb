"""`make release`: the files of a release, made of the last commit alone. Two runs give the same bytes.

commit ─▶ a clean tree ─▶ weir_rl-VERSION.tar.gz, weir_rl-VERSION-py3-none-any.whl
                       └▶ weir-chart-VERSION.tgz        the Helm chart (`deploy/chart.py`)
locks that the wheel brings ─▶ weir_rl-VERSION.cdx.json     every package that they install (CycloneDX)
                            └▶ weir_rl-VERSION-licences.txt  its licence, as its own metadata says it
all of these, and what --with names (lists of images, the site) ─▶ SHA256SUMS

The version is that of pyproject.toml. CHANGELOG.md has to say what is new in it and when it was released, and
the commit has to bear its tag.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = (".venv", ".venv-engine")
"""Where the packages of the locks are installed, so that their metadata can be read."""
UNKNOWN = "not installed here: not known"


@dataclass(frozen=True)
class Locked:
    """A package of the locks."""

    name: str
    version: str
    hashes: tuple[str, ...]
    locks: tuple[str, ...]
    licence: str

    @property
    def purl(self) -> str:
        # What follows + is the build of torch, and + is a space in an address.
        return f"pkg:pypi/{self.name}@{self.version.replace('+', '%2B')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="directory of the files; it is emptied"
    )
    parser.add_argument("--untagged", action="store_true", help="try it with a commit that bears no tag")
    parser.add_argument(
        "--no-chart", dest="chart", action="store_false", help="leave out the Helm chart, which needs kubectl"
    )
    parser.add_argument("--with", dest="others", type=Path, nargs="*", default=[], help="files to put beside")
    given = parser.parse_args()
    project = tomllib.loads(in_commit("pyproject.toml"))["project"]
    check_changelog(project["version"], given.untagged)
    if not given.untagged:
        check_tag(project["version"])
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    epoch = int(git("show", "--no-patch", "--format=%ct", "HEAD"))
    build(given.out, epoch, given.chart)
    packages = locked_packages(project["name"])
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    bom = bill_of_materials(project, packages, epoch)
    (given.out / f"{stem}.cdx.json").write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
    (given.out / f"{stem}-licences.txt").write_text(
        "\n".join([*licence_lines(packages), ""]), encoding="utf-8"
    )
    for other in given.others:
        shutil.copyfile(other, given.out / other.name)
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(given.out.iterdir())
    ]
    (given.out / "SHA256SUMS").write_text("\n".join([*sums, ""]), encoding="ascii")
    print("\n".join(sums))


def git(*arguments: str) -> str:
    git = shutil.which("git") or "git"
    command = [git, "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def in_commit(path: str) -> str:
    """The text of a file in the last commit. Ends the program if the commit lacks it."""
    if path not in git("ls-tree", "--name-only", "HEAD", path).splitlines():
        raise SystemExit(f"the last commit has no {path}")
    return git("show", f"HEAD:{path}")


def check_changelog(version: str, untagged: bool) -> None:
    """Ends the program unless the newest entry of the changelog is that of this version, with a date."""
    entries = re.split(r"^## ", in_commit("CHANGELOG.md"), flags=re.M)[1:]
    newest, _, text = (entries or [""])[0].partition("\n")
    if newest.split(" ")[0] != version or not text.strip():
        raise SystemExit(f"the newest entry of CHANGELOG.md is {newest!r}: write what is new in {version}")
    if not untagged and not re.fullmatch(r"\S+ \(\d{4}-\d\d-\d\d\)", newest):
        raise SystemExit(
            f"CHANGELOG.md does not say when {version} was released: `## {version} (YYYY-MM-DD)`"
        )


def check_tag(version: str) -> None:
    """Ends the program unless the last commit bears the version's tag."""
    if f"v{version}" not in git("tag", "--points-at", "HEAD").splitlines():
        raise SystemExit(
            f"the last commit bears no tag v{version}: `git tag v{version}`, or --untagged to try"
        )


def build(out: Path, epoch: int, with_chart: bool) -> None:
    """What is made of the files of the last commit. Ends the program with the builder's words if it fails."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    commands = [["-m", "hatchling", "build", "-d", str(out.absolute())]]
    commands += [["deploy/chart.py", "--out", str(out.absolute())]] if with_chart else []
    with tempfile.TemporaryDirectory() as folder:
        tree, archive = Path(folder) / "tree", Path(folder) / "tree.tar"
        git("archive", "--output", str(archive), "HEAD")
        with tarfile.open(archive) as files:
            files.extractall(tree, filter="data")
        for words in commands:
            command = [sys.executable, *words]
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{' '.join(words[:2])} failed: {done.stderr}")


def locked_packages(project: str) -> list[Locked]:
    """The packages of all locks that the wheel brings, each once with all of its files."""
    wheel = tomllib.loads(in_commit("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    licences = installed_licences()
    hashes: dict[tuple[str, str], list[str]] = {}
    locks: dict[tuple[str, str], list[str]] = {}
    for lock in sorted(wheel["force-include"]):
        for entry in in_commit(lock).replace("\\\n", " ").splitlines():
            name, _, version = entry.split()[0].partition("==")
            package = (normal(name), version)
            hashes.setdefault(package, []).extend(re.findall(r"sha256:(\w+)", entry))
            locks.setdefault(package, []).append(Path(lock).name)
    return [
        Locked(*key, tuple(sorted(set(hashes[key]))), tuple(locks[key]), licences.get(key, UNKNOWN))
        for key in sorted(hashes)
        if key[0] != project
    ]


def normal(name: str) -> str:
    """The normalised name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_licences() -> Mapping[tuple[str, str], str]:
    """The licence of each package in this checkout's environments."""
    folders = [
        str(path) for each in ENVIRONMENTS for path in (ROOT / each).glob("lib/python3*/site-packages")
    ]
    return {(normal(each.name), each.version): licence_of(each) for each in distributions(path=folders)}


def licence_of(package: Distribution) -> str:
    """What the metadata says: an expression, else classifiers, else the first line of a text."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [each for each in metadata.get_all("Classifier") or [] if each.startswith("License :: ")]
    if names := [each.rpartition(" :: ")[2] for each in classifiers if each != "License :: OSI Approved"]:
        return "; ".join(names)
    text = metadata["License"].strip() if "License" in metadata else ""
    return text.partition("\n")[0] or "its metadata names none"


def licence_lines(packages: Iterable[Locked]) -> Iterable[str]:
    yield "The packages that Weir installs, and their licences as their metadata says them."
    yield "The page's own libraries have theirs in weir/_services/gateway/page/assets/vendor."
    yield ""
    for each in packages:
        yield f"{each.name} {each.version}: {each.licence}  ({', '.join(each.locks)})"


def bill_of_materials(project: Mapping[str, Any], packages: Sequence[Locked], epoch: int) -> dict[str, Any]:
    """A CycloneDX document of what the locks install."""
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    content = json.dumps([own, epoch, *((each.purl, each.hashes) for each in packages)])
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            },
        },
        "components": [
            {
                "type": "library",
                "bom-ref": each.purl,
                "name": each.name,
                "version": each.version,
                "purl": each.purl,
                "hashes": [{"alg": "SHA-256", "content": content} for content in each.hashes],
                "licenses": [{"license": {"name": each.licence}}] if each.licence != UNKNOWN else [],
                "properties": [{"name": "weir:lock", "value": lock} for lock in each.locks],
            }
            for each in packages
        ],
        "dependencies": [{"ref": own, "dependsOn": [each.purl for each in packages]}],
    }


if __name__ == "__main__":
    main()
