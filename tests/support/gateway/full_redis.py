"""A Redis that answers, and stores nothing more."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.gateway.running import RunningGateway


@contextmanager
def full(gateway: RunningGateway) -> Iterator[None]:
    """Redis answers what it is asked, and stores nothing more."""
    gateway.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        gateway.redis.config_set("maxmemory", 0)
