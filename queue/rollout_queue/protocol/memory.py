"""An engine's memory: trainer ─▶ rollout server, `POST /memory/release` and `POST /memory/resume`."""

from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import ServiceMessage

LONGEST_S = 600.0
"""The longest time for which the memory is given away at once. A trainer that needs longer asks again."""


class ReleaseBody(ServiceMessage):
    """Who wants the memory, and for how many seconds."""

    model_config = ConfigDict(extra="forbid", strict=False)

    holder: str = Field(min_length=1, max_length=128)
    for_s: float = Field(gt=0, le=LONGEST_S)


class MemoryReleased(ServiceMessage):
    """The memory is the holder's."""

    version: int
    """The version that the engine served."""
    renewed: bool
    """Whether the memory was given away already."""


class ResumeBody(ServiceMessage):
    """Who gives the memory back; null takes it from anyone."""

    model_config = ConfigDict(extra="forbid", strict=False)

    holder: str | None = Field(None, min_length=1, max_length=128)


class MemoryResumed(ServiceMessage):
    """The memory is the engine's."""

    version: int
    """The version that the engine serves, or starts with."""
