"""The memory of the gateways: it is flat if it grows no more after a third of the soak.

samples of one process:  ├── begins ──┼─ first window ─┤ …………………………… ├─ last window ─┤
                         0           1/3                                              1

The median of the last window may exceed the median of the first by a tenth, and by the bytes by which the
gateway's cache of session heads may have grown: those of all later turns, up to the cache's limit.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence

import msgspec
import psutil

from rollout_queue.redis.session_heads import CACHE_BYTES, OUTPUT_BYTES, SESSION_BYTES, TURN_BYTES

MIB = 2**20
BEGINS = 1 / 3
WINDOW = 1 / 12
TOLERANCE = 1.1
TURN_OVERHEAD_BYTES = TURN_BYTES + SESSION_BYTES
"""The most memory that a turn takes apart from its tokens. Turns of one session share the session's part."""
EVERY_S = 0.5


class MemorySample(msgspec.Struct, frozen=True):
    at: float
    """The time of the sample, from 0 (the soak begins) to 1 (it ends)."""
    rss: int


class MemoryRow(msgspec.Struct, frozen=True):
    """One gateway's resident memory in MiB."""

    gateway: str
    first: float
    last: float
    highest: float
    bound: float

    @property
    def flat(self) -> bool:
        return self.last <= self.bound


def judged(gateway: str, samples: Sequence[MemorySample], turns: int, tokens_per_turn: int) -> MemoryRow:
    """`turns`: how many turns all gateways recorded after the first window. Each gateway may hold all."""
    first = median(samples, BEGINS, BEGINS + WINDOW)
    filled = min(CACHE_BYTES, turns * (TURN_OVERHEAD_BYTES + tokens_per_turn * OUTPUT_BYTES))
    return MemoryRow(
        gateway,
        first / MIB,
        median(samples, 1 - WINDOW, 1) / MIB,
        max(sample.rss for sample in samples) / MIB,
        (TOLERANCE * first + filled) / MIB,
    )


def median(samples: Sequence[MemorySample], begin: float, end: float) -> float:
    return statistics.median(sample.rss for sample in samples if begin <= sample.at <= end)


async def sample_memory(
    processes: Sequence[psutil.Process], began: float, until: float
) -> list[list[MemorySample]]:
    """Take samples of each process until `until`, a time of `time.monotonic`."""
    found: list[list[MemorySample]] = [[] for _ in processes]
    while (now := time.monotonic()) < until:
        share = (now - began) / (until - began)
        for process, samples in zip(processes, found, strict=True):
            samples.append(MemorySample(share, process.memory_info().rss))
        await asyncio.sleep(EVERY_S)  # the next sample
    return found
