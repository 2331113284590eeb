"""Writes files that are whole after a crash, also of the machine."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a draft to the disk, which then takes the place of the old file. Raises OSError."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
