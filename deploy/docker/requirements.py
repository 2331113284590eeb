"""Prints what pyproject.toml pins for some extras, so that an image installs it before it copies the code.

python requirements.py [--only torch | --without torch] gateway cli
"""

import argparse
import re
import tomllib
from pathlib import Path


def pinned(pyproject: Path, extras: list[str]) -> list[str]:
    """The base dependencies and those of `extras`, sorted, each once."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = set(project["dependencies"])
    for extra in extras:
        lines.update(project["optional-dependencies"][extra])
    return sorted(lines)


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--only", help="print this package alone")
    parser.add_argument("--without", help="leave this package out")
    parser.add_argument("--pyproject", type=Path, default=Path("pyproject.toml"))
    asked = parser.parse_args()
    for line in pinned(asked.pyproject, asked.extras):
        if asked.only in (None, name_of(line)) and name_of(line) != asked.without:
            print(line)
