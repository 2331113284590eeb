"""Two ways to name a policy: as a caller asks for it, and as it lies on this machine."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WantedPolicy:
    """A version that is to be served. Only the one that the engine starts with has no location."""

    version: int
    location: str | None = None
    manifest_sha256: str | None = None
    peer: str | None = None
    """The URL of a rollout server that has its files."""
    name: str | None = None
    """The name of an adapter that is a policy of its own; None for the fleet's policy."""

    def is_same_as(self, policy: "LocalPolicy") -> bool:
        """Whether `policy` is this version, with this content."""
        digest = self.manifest_sha256
        same_content = digest is None or digest.lower() == policy.manifest_sha256
        return self.version == policy.version and same_content


@dataclass(frozen=True)
class LocalPolicy:
    """One numbered set of weights on this machine, as the engine loads it."""

    version: int
    directory: Path
    manifest_sha256: str | None = None
    """None for the model that the engine starts with: nobody published it."""
    base: "LocalPolicy | None" = None
    """For a LoRA adapter, the weights that it is applied to."""
    name: str | None = None
    """As in `WantedPolicy`."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ValueError(f"a version is not negative: {self.version}")

    @property
    def weights(self) -> "LocalPolicy":
        """The whole weights that the engine has in memory when it serves this policy."""
        return self.base or self

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name in the engine, which belongs to this content alone; None without an adapter.

        SGLang loads an adapter that it has dropped again from the directory that its name had before. So a
        name is never used for other content.
        """
        return self.directory.name if self.base is not None else None
