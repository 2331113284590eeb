"""Writes files that survive a power cut: under another name first, then synced and renamed; and lists of
files with their digests, by which damage is noticed before they are read."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollout_queue.contract.published_policy import FileSpec, sha256_of


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file's content. A crash leaves all of the old or all of the new one. Raises OSError."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process. The kernel removes the lock when the process dies, however it dies.

    Raises SystemExit when another process has the lock: two trainers would write the same checkpoints.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another trainer runs on {directory}") from None
        yield


def sync_tree(directory: Path) -> None:
    """Make every file and name below `directory` durable."""
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FILES = "files.json"


class Damaged(Exception):
    """A file of the list is missing, or has another content. The message names it."""


def write_file_list(directory: Path) -> None:
    """List all files below `directory`. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    specs = [
        FileSpec(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_of(path))
        for path in paths
    ]
    (directory / FILES).write_bytes(msgspec.json.encode(specs))


def verify_file_list(directory: Path) -> None:
    """Raises Damaged."""
    try:
        specs = msgspec.json.decode((directory / FILES).read_bytes(), type=list[FileSpec])
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(f"{FILES}: {error}") from error
    for spec in specs:
        path = directory / spec.name
        try:
            same = path.stat().st_size == spec.size and sha256_of(path) == spec.sha256
        except OSError as error:
            raise Damaged(f"{spec.name}: {error}") from error
        if not same:
            raise Damaged(f"{spec.name} has another content than was written")
