"""The release that a process runs: its package's version, the schema of its records, and its very build."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rollout_queue.contract.codec import SCHEMA

PACKAGE = Path(__file__).parents[1]
"""What the services share, so that all services of one build have it alike."""


@cache
def release() -> str:
    """For instance `0.1.0, schema 1, build 3f2a9c1e`. Services with the same schema understand each other's
    records; those with the same text have the same code in common."""
    try:
        number = version("weir")
    except PackageNotFoundError:  # started from a source tree that is not installed
        number = "source"
    return f"{number}, schema {SCHEMA}, build {_build()}"


def _build() -> str:
    """A digest of the source files that all services have."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]
