"""Waits until gateways have polled Redis. They do so every `poll_every_s`, and later on a busy machine."""

from typing import Any

from redis import Redis

from tests.support.waiting import wait_until

MOST_GATEWAYS = 6
"""The most gateways that poll one Redis at the same time in a test."""

XLENS = 4
"""A poll sends XLEN at most so often: the stream, the dead letters, and two more streams that may be lost."""


def polled(redis: Redis, times: int = 2) -> None:
    """Wait until each gateway has polled `times` times, if the gateways take turns."""

    def looks() -> int:
        stats: Any = redis.info("commandstats")
        return int(stats.get("cmdstat_xlen", {}).get("calls", 0))

    began = looks()
    wait_until(lambda: looks() >= began + (times + 1) * MOST_GATEWAYS * XLENS)
