"""Tells base models apart, so that no checkpoint is loaded over another one, whatever their paths are."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

PIECES, PIECE_BYTES = 64, 64 * 1024
"""So many pieces of each file of weights are read, at equal distances. A model of any size is read quickly,
and a training changes nearly every weight."""


@dataclass(frozen=True)
class BaseModel:
    """The model over which all others are trained."""

    path: str
    digest: str
    """SHA-256 of the configuration, and of pieces of the weights."""

    @classmethod
    def of(cls, directory: Path) -> "BaseModel":
        """Raises OSError."""
        digest = hashlib.sha256((directory / "config.json").read_bytes())
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for at in range(PIECES):
                    file.seek(at * size // PIECES)
                    digest.update(file.read(PIECE_BYTES))
        return cls(str(directory), digest.hexdigest())

    def is_named(self, path: str, digest: str) -> bool:
        """Whether a record names this one. Records of older builds have no digest."""
        return digest == self.digest if digest else path == self.path
