"""The manifest of a backup: what it contains, with the SHA-256 of every file. It is written last."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trainer_service.storage.durable_files import sync_directory, write_atomically
from weir.errors import StackError

MANIFEST = "backup.json"
FORMAT = 1
PIECE = 1 << 20


class BackupBroken(StackError):
    """The directory is no backup, or not a whole one."""


class BackedUpFile(msgspec.Struct, frozen=True):
    """One file: its size in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `backup.json`."""

    format: int = FORMAT
    taken_at: float
    """The moment that the backup shows, in Unix seconds."""
    release: str
    redis_version: str
    """The server that was copied. Another one must not be older."""
    keys: int
    checkpoint: str | None
    """The tag of the checkpoint; None if the trainer had made none."""
    step: int | None = None
    version: int | None = None
    policies: tuple[int, ...] = ()
    """The versions whose files are in the backup."""
    policies_dir: str = ""
    """Where the trainer had its versions."""
    files: Mapping[str, BackedUpFile] = {}


def copy_file(source: Path, target: Path, most: int | None = None) -> BackedUpFile:
    """Copy a file, at most `most` bytes of it, durably, and readable by its owner alone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), most if most is not None else source.stat().st_size
    size = 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with source.open("rb") as reading, os.fdopen(descriptor, "wb") as writing:
        while left > 0 and (piece := reading.read(min(PIECE, left))):
            writing.write(piece)
            digest.update(piece)
            size += len(piece)
            left -= len(piece)
        writing.flush()
        os.fsync(writing.fileno())
    return BackedUpFile(size, digest.hexdigest())


def noted(path: Path) -> BackedUpFile:
    """What the manifest says of a file that is in the backup already. The file is made durable."""
    path.chmod(0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return BackedUpFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(directory: Path, manifest: BackupManifest) -> None:
    """Make all names durable, and then the backup a whole one."""
    for folder in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        sync_directory(folder)
    write_atomically(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(directory: Path) -> BackupManifest:
    """Raises BackupBroken."""
    path = directory / MANIFEST
    if not path.is_file():
        raise BackupBroken(f"{directory} has no {MANIFEST}: it is no backup, or one that was not finished")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=BackupManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise BackupBroken(f"{path} cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise BackupBroken(
            f"{path} has format {manifest.format}, and this release reads {FORMAT}: use a newer release"
        )
    return manifest


def verify(directory: Path, manifest: BackupManifest) -> None:
    """Compare every file with the manifest. Raises BackupBroken, which names the first file that differs."""
    for name, said in manifest.files.items():
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BackupBroken(f"{directory / MANIFEST} names {name}, which is not in the backup")
        if not path.is_file():
            raise BackupBroken(f"{path} is missing")
        if (size := path.stat().st_size) != said.size:
            raise BackupBroken(f"{path} has {size} bytes, and not {said.size}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != said.sha256:
                raise BackupBroken(f"{path} is damaged: its SHA-256 is another one")


def files_below(directory: Path, manifest: BackupManifest, folder: str) -> Iterator[tuple[Path, Path]]:
    """The files of a folder of the backup: each one, and its path below the folder."""
    for name in manifest.files:
        if name.startswith(f"{folder}/"):
            yield directory / name, Path(name).relative_to(folder)
