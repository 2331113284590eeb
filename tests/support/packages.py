"""The packages of the product, and their modules."""

from collections.abc import Iterator
from pathlib import Path

from bench.house import HERE
from bench.house import PACKAGES as FOLDERS

ROOT = HERE
PACKAGES = {name: ROOT / folder for name, folder in FOLDERS.items()}


def sources(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package, with its dotted name."""
    root = PACKAGES[package]
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).with_suffix("").parts
        yield ".".join([package, *inside]), path
