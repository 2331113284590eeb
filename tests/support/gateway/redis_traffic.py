"""How many bytes Redis sends to answer a request."""

from collections.abc import Callable
from typing import Any

from tests.support.gateway.running import RunningGateway

TOKENS = 2**20
TURN_BYTES = 4 * TOKENS
"""An id takes four bytes, so no answer of Redis with a turn of so many tokens is shorter."""


def sent_by_redis(gateway: RunningGateway, act: Callable[[], object]) -> int:
    """How many bytes Redis sent meanwhile, to all of its clients."""

    def sent() -> int:
        stats: Any = gateway.redis.info("stats")
        return int(stats["total_net_output_bytes"])

    before = sent()
    act()
    return sent() - before
