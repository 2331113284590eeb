"""A Redis that still answers and refuses to store anything more."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.gateway.running import RunningGateway


@contextmanager
def full(gateway: RunningGateway) -> Iterator[None]:
    """Inside this context, Redis answers reads and refuses writes that need memory."""
    gateway.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        gateway.redis.config_set("maxmemory", 0)
