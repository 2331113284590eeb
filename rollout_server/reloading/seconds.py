"""What a reload reports of itself."""

import msgspec


class Seconds(msgspec.Struct):
    """How long the parts of a reload took."""

    fetch: float = 0.0
    verify: float = 0.0
    load: float = 0.0
    paused: float = 0.0
    fallback: str | None = None
    """Why the files were loaded, although the trainer offered to send the tensors."""
