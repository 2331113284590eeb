"""Renews the libraries of the page from the npm registry: `make page-vendor`.

`vendor.json` says which file is taken from which package, and what is changed in it: browsers find modules by
their path, and not by the name of a package. The hashes are those of the files as they lie there.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "gateway/page/assets/vendor"


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def vendored() -> list[dict[str, Any]]:
    """The entries of vendor.json, one for each file."""
    found: list[dict[str, Any]] = json.loads((FOLDER / "vendor.json").read_text(encoding="utf-8"))["files"]
    return found


def renew(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Take one file and its licence from the package of this version. Returns the entry with the new hash."""
    spec = f"{entry['name']}@{entry['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), spec]
    packed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    with tarfile.open(folder / packed) as archive:
        text = _member(archive, entry["source"])
        (FOLDER / entry["licence_file"]).write_text(_member(archive, "LICENSE"), encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL")]
    text = "\n".join(lines) + "\n" + entry["appended"]
    for old, new in entry["replaced"].items():
        assert old in text, f"{spec}: {entry['source']} has no {old}"
        text = text.replace(old, new)
    (FOLDER / entry["file"]).write_text(text, encoding="utf-8")
    return entry | {"sha256": digest_of(FOLDER / entry["file"])}


def _member(archive: tarfile.TarFile, name: str) -> str:
    found = archive.extractfile(f"package/{name}")
    assert found is not None, name
    return found.read().decode()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [renew(entry, Path(folder)) for entry in vendored()]
    text = json.dumps({"files": files}, indent=2) + "\n"
    (FOLDER / "vendor.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
