"""A cache of a function's results that counts its hits and misses, also across its clearing."""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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
