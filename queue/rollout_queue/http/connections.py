"""The bounds on a service's connections: how many there are, and how long a peer may be silent."""

import logging
import resource
from collections import Counter

from pydantic import BaseModel, ConfigDict, Field

from rollout_queue.http.errors import ApiError

logger = logging.getLogger(__name__)

OTHER_FILES = 256
"""Files that a service may open besides its clients' connections and as many connections to engines."""


class ConnectionBounds(BaseModel):
    """Bounds on the connections to one service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    in_all: int = Field(8192, ge=1)
    """Connections that are open at once, idle ones included; a further one gets a 429."""
    per_address: int = Field(4096, ge=1)
    """The same for one address of a client. All clients behind one proxy have the proxy's address."""
    head_bytes: int = Field(64 * 2**10, ge=1024)
    """Largest request line and headers together; a larger head gets a 431."""
    head_timeout_s: float = Field(10.0, gt=0)
    """A request's head has to arrive within this time. If only a part arrives, the client gets a 408; if no
    byte arrives on a new connection, the connection is just closed."""
    body_timeout_s: float = Field(30.0, gt=0)
    """A body of which not even 1 KiB arrives within this time gets a 408."""
    write_timeout_s: float = Field(30.0, gt=0)
    """A client that does not read even 1 KiB of its waiting answer within this time is disconnected."""


class ConnectionCount:
    """The open connections to one service, by address."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self.refused = 0
        self._in_all = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str) -> ApiError | None:
        """Count a new connection, or return the error that refuses it."""
        if self._in_all >= self.bounds.in_all:
            return _too_many(f"this service has {self._in_all} connections, and takes no more")
        if self._by_address[address] >= self.bounds.per_address:
            return _too_many(f"your address has {self._by_address[address]} connections, and gets no more")
        self._in_all += 1
        self._by_address[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._in_all -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def allow_files(bounds: ConnectionBounds) -> ConnectionBounds:
    """Raise this process's limit on open files as far as the bounds need it and the system permits.

    Returns the bounds, with fewer connections if the system permits fewer files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * bounds.in_all + OTHER_FILES
    permitted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < permitted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (permitted, hard))
    if permitted >= wanted:
        return bounds
    in_all = max(1, (permitted - OTHER_FILES) // 2)
    logger.warning("the system permits %d open files: at most %d connections are taken", permitted, in_all)
    return bounds.model_copy(update={"in_all": in_all})


def _too_many(message: str) -> ApiError:
    return ApiError(429, message, code="connections_limit")
