"""The reasons why a version is not loaded, each with the HTTP status of the answer to `/reload`.

ReloadError
├─ LocationRefused      400  the location is missing, malformed, or under no allowed prefix
├─ VersionRefused       409  the version is lower than the one served, or the same with other content
├─ PushReplaced         409  the gateway has begun a newer push since
├─ ReloadAborted        409  the gateway has ended this reload
├─ MemoryRefused        409  the memory is not shared, or another trainer has it
├─ NotServed            400  an orchestrator asks for what this server does not do
├─ WeightsRefused       422  the files are not a sound set of weights for this model
├─ WeightsUnavailable   503  the files cannot be fetched or read now
└─ EngineUnavailable    503  the engine is not ready, or did not load the version

After each of these errors the engine serves the version that it served before. It may restart first.
"""

from typing import ClassVar


class ReloadError(Exception):
    """A version was not loaded. The metrics count such failures by `status`."""

    status: ClassVar[int]
    type: ClassVar[str | None] = None
    """The error's type in the answer; None if it follows from the status."""
    param: ClassVar[str | None] = None
    code: ClassVar[str | None] = None


class LocationRefused(ReloadError):
    """The location is missing, malformed, or under no allowed prefix."""

    status = 400
    param = "location"


class VersionRefused(ReloadError):
    """The version is lower than the one served, or the same with other content. `force` loads it anyway."""

    status = 409


class PushReplaced(ReloadError):
    """The gateway has begun a newer push since."""

    status = 409
    code = "push_replaced"


class ReloadAborted(ReloadError):
    """The gateway has ended this reload, before the engine paused."""

    status = 409
    code = "reload_aborted"


class MemoryRefused(ReloadError):
    """The engine's memory is not shared, or another trainer has it."""

    status = 409
    code = "memory_refused"


class NotServed(ReloadError):
    """An orchestrator asks for what this server does not do."""

    status = 400
    code = "not_supported"


class WeightsRefused(ReloadError):
    """The files are not a sound set of weights for this model."""

    status = 422
    code = "broken_weights"


class WeightsUnavailable(ReloadError):
    """The files cannot be fetched or read now."""

    status = 503
    type = "storage_unavailable"


class EngineUnavailable(ReloadError):
    """The engine is not ready, or did not load the version."""

    status = 503
