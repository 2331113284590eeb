"""What is counted where calls pass: such counters cost a fraction of prometheus_client's own.

They belong to the event loop's thread, but for `ThreadSeconds`. `prometheus.py` shows them.
"""

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from rollout_queue import clock

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS: Final = (0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CLIENT_LEFT: Final = 499
"""The status of a call whose client left before the answer began."""


class Distribution:
    """A histogram: how many values are at most as large as each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many values lie between each bound and the one before; the last counts larger values."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[int]:
        """How many values are at most as large as each bound, and in all."""
        return accumulate(self.counts)


class TimeSpent(msgspec.Struct):
    """The seconds that one part of the calls took, and how often it ran."""

    seconds: float = 0.0
    runs: int = 0

    def since(self, began: float) -> float:
        """Count a run that ends now. `began` and the returned end are times of `clock.monotonic`."""
        ended = clock.monotonic()
        self.seconds += ended - began
        self.runs += 1
        return ended

    def add(self, seconds: float) -> None:
        """Count a run."""
        self.seconds += seconds
        self.runs += 1


class CallFigures:
    """The figures of one dialect's calls. Everything else that HTTP serves counts as the dialect `rest`."""

    __slots__ = (
        "dialect",
        "engine_wait",
        "first_token",
        "gaps",
        "ignoring",
        "in_flight",
        "joined",
        "parse",
        "read",
        "record",
        "render",
        "sample",
        "session",
        "statuses",
        "tokenize",
    )

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.statuses: dict[int, int] = defaultdict(int)
        self.in_flight = 0
        self.ignoring = 0
        """Calls with fields that the gateway did not know, and ignored."""
        self.joined = 0
        """Calls that joined a call in flight, which they repeat. The worker that serves it counts them."""
        self.first_token = Distribution(SECONDS)
        self.gaps = Distribution(GAP_SECONDS)
        self.engine_wait = Distribution(SECONDS)
        """Until an engine accepted the request, or none did."""
        self.read = TimeSpent()
        self.session = TimeSpent()
        self.render = TimeSpent()
        self.tokenize = TimeSpent()
        self.sample = TimeSpent()
        self.parse = TimeSpent()
        self.record = TimeSpent()

    @property
    def parts(self) -> Mapping[str, TimeSpent]:
        """The parts of a call, in their order."""
        return {
            "read": self.read,
            "session": self.session,
            "render": self.render,
            "tokenize": self.tokenize,
            "wait": TimeSpent(self.engine_wait.total, sum(self.engine_wait.counts)),
            "sample": self.sample,
            "parse": self.parse,
            "record": self.record,
        }

    def rendered(self, seconds: float, tokenizer_s: float) -> None:
        """A prompt was rendered; the tokenizer had a share of the time."""
        self.render.add(seconds - tokenizer_s)
        self.tokenize.add(tokenizer_s)

    def sampled(self, began: float, accepted: float | None, ended: float) -> None:
        """An answer ended, or failed; `accepted` is when the first engine took it, if one did."""
        self.engine_wait.add((ended if accepted is None else accepted) - began)
        if accepted is not None:
            self.sample.add(ended - accepted)


P = ParamSpec("P")
T = TypeVar("T")


class ThreadSeconds(threading.local):
    """How many seconds the current thread has spent in the tokenizer, since the thread began."""

    seconds = 0.0


class PromptTime(msgspec.Struct):
    """The times of one prompt, once `run` has returned or raised."""

    spent: ThreadSeconds
    seconds: float = 0.0
    tokenizer_s: float = 0.0

    def run(self, work: Callable[[], T]) -> T:
        spent = self.spent
        began, before = clock.monotonic(), spent.seconds
        try:
            return work()
        finally:
            self.seconds, self.tokenizer_s = clock.monotonic() - began, spent.seconds - before


class CacheLookups(NamedTuple):
    """How many lookups found their result in a cache, and how many did not."""

    hits: int
    misses: int


class CountedCache(Generic[P, T]):
    """`lookup` calls the function, or returns one of its `size` latest results."""

    def __init__(self, function: Callable[P, T], size: int) -> None:
        cached = lru_cache(size)(function)
        self.lookup: Callable[P, T] = cached
        self._cached = cached
        self._hits = self._misses = 0

    def lookups(self) -> CacheLookups:
        info = self._cached.cache_info()
        return CacheLookups(self._hits + info.hits, self._misses + info.misses)

    def clear(self) -> None:
        self._hits, self._misses = self.lookups()
        self._cached.cache_clear()


@dataclass(frozen=True)
class FleetFigures:
    """The fleet as one gateway process sees it."""

    placed: Mapping[str, int]
    """How many calls were placed, by reason (`fleet/placement.py`)."""
    waiting: int
    """Calls that wait for a server in this process."""
    running: int
    """Requests that run in the engines of all ready servers, from all gateways."""
    queued: int
    """Requests that wait in these engines."""
    kv_usage: float | None
    """The mean share of the key-value cache that running requests have; None if no engine says so."""
    limit: int | None
    """The sum of the servers' limits of calls; None if none has one."""


@dataclass
class PromptTokens:
    """The tokens of the prompts of recorded turns."""

    prompt: int = 0
    cached: int = 0
    """Those that the engine had in its cache, and so did not compute."""
