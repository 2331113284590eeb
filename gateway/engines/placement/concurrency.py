"""How many calls a server may have at once, from what its engine reports: arithmetic only.

A limit grows while no call waits in the engine and its key-value cache has room, and shrinks when calls wait
or the cache fills up. An engine whose cache is full retracts calls: it computes their tokens again later.
"""

import math
from dataclasses import dataclass

from gateway.settings.groups import ConcurrencySettings

BINDS = 0.9
"""A limit grows only if the engine has at least this share of it: else more room would not be used."""


@dataclass(frozen=True)
class EngineLoad:
    """What an engine reports of its load; the calls are those of all gateways."""

    running: int
    waiting: int
    kv_usage: float | None = None
    """The share of its key-value cache that running calls have; None if it does not say."""

    @property
    def calls(self) -> int:
        return self.running + self.waiting


def next_limit(limit: int | None, load: EngineLoad, settings: ConcurrencySettings) -> int | None:
    """The limit after one more report; `limit` is the one before. None: no limit.

    The cache fills up only while answers grow, so a report lags behind what the running calls will need. So
    the limit grows by the share of the target that is free, by less the nearer the target is, and never above
    the number of calls that would reach the target if each took as much as those that run do. It is cut only
    when the last cut has had its effect: when the engine has no more calls than the limit.
    """
    if not settings.adaptive or load.kv_usage is None:
        return None
    if limit is None:
        limit = max(settings.first, load.calls)
    if load.kv_usage > settings.kv_high:
        if load.calls <= limit:
            limit = math.floor(min(limit, load.running) * settings.shrink)
    elif load.waiting:
        if load.calls <= limit:
            limit = load.running
    elif load.kv_usage < settings.kv_target and load.running >= BINDS * limit:
        free = 1.0 - load.kv_usage / settings.kv_target
        grown = limit + max(1, math.floor(limit * free))
        reached = load.running * settings.kv_target / load.kv_usage if load.kv_usage else math.inf
        limit = max(limit, math.floor(min(grown, reached)))
    return max(settings.least, min(limit, settings.most))
