"""A list of the files of a directory with their digests, by which damage is noticed before they are read."""

from pathlib import Path

import msgspec

from rollout_queue.contract.policies.policy import FileSpec, sha256_of

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
