"""What an engine serves: one version, the directory it was loaded from, and proof of its content."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True)
class Policy:
    """One numbered set of weights on this machine, as the engine loads it."""

    version: int
    directory: Path
    manifest_sha256: str | None = None
    """None for the model that the engine starts with: nobody published it."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a version is not negative: {self.version}")


class State(StrEnum):
    """Where a rollout server is, as `/status` says it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
