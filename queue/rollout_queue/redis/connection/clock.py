"""Estimates the time by Redis' clock, so that Redis stores nothing for a script that it runs too late."""

from rollout_queue import clock
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.pipelined import PipelinedConnection

READ_EVERY_S = 60.0
"""The clocks of two machines may drift apart by some milliseconds in this time."""


class RedisClock:
    """Reads Redis' clock once a minute. The estimate is never ahead, unless the clock was set back."""

    def __init__(self, connection: PipelinedConnection) -> None:
        self._connection = connection
        self._ahead_s = 0.0
        """By how much Redis' clock is ahead of this process' monotonic clock."""
        self._read_at = float("-inf")

    async def deadline_ms(self, within_s: float) -> int:
        """The moment `within_s` from now, in milliseconds by Redis' clock. Raises StorageUnavailable."""
        began = clock.monotonic()
        if began - self._read_at > READ_EVERY_S:
            await self.read()
        return int((began + within_s + self._ahead_s) * 1000)

    async def read(self) -> None:
        """Read the clock now. Raises StorageUnavailable."""
        seconds, microseconds = await stored(self._connection.command("TIME"))
        # Redis read its clock before this moment, so an answer that took long makes the estimate too low.
        self._read_at = clock.monotonic()
        self._ahead_s = int(seconds) + int(microseconds) / 1e6 - self._read_at
