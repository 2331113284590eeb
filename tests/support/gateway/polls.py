"""Waits until gateways have looked at Redis, as they do every `poll_every_s`, on a busy machine later."""

from typing import Any

from redis import Redis

from tests.support.waiting import wait_until

MOST_GATEWAYS = 3
"""That poll one Redis at the same time in a test."""


def polled(redis: Redis, times: int = 2) -> None:
    """Until each gateway has looked so many times, if they look in turn: each look is one XLEN."""

    def looks() -> int:
        stats: Any = redis.info("commandstats")
        return int(stats.get("cmdstat_xlen", {}).get("calls", 0))

    began = looks()
    wait_until(lambda: looks() >= began + (times + 1) * MOST_GATEWAYS)
