"""The release that a process runs: the version of its package, and the schemas that it reads and writes."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollout_queue.contract.codec import SCHEMA


@cache
def release() -> str:
    """For instance `0.1.0, schema 1`. Two services with the same text understand each other's records."""
    try:
        number = version("weir")
    except PackageNotFoundError:  # started from a source tree that is not installed
        number = "source"
    return f"{number}, schema {SCHEMA}"
