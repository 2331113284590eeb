"""Files that only the user of this process can read."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write the file atomically, readable by its owner alone: it may have keys. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    made = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(made, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
