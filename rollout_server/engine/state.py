"""The states of a rollout server."""

from enum import StrEnum


class ServerState(StrEnum):
    """The state of a rollout server, as `/status` gives it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RELEASED = "released"
    """Paused, without its memory. Gateways are told that it loads, because calls have to wait as then."""
    DRAINING = "draining"
    DEAD = "dead"
