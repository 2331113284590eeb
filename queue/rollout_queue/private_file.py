"""Files and directories that only the user of this process can read."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def make_private_directory(path: Path) -> None:
    """Make the directory, or change the one that is there, so that only its owner reaches what is in it.
    Raises OSError; a directory that all users write to, such as /tmp, is not changed."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if mode & stat.S_ISVTX:
        raise PermissionError(f"all users of this machine write to {path}")
    if stat.S_IMODE(mode) != 0o700:
        path.chmod(0o700)


def append_private(path: Path) -> BinaryIO:
    """The file, open for more at its end; a new one is readable by its owner alone. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def write_private(path: Path, text: str) -> None:
    """Write the file atomically, readable by its owner alone: it may have keys. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(made, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
