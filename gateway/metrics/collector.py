"""Gives Prometheus the figures of calls, the lag of the event loop, and the hits of caches."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.metrics.calls import CallFigures
from gateway.metrics.counted_cache import CacheLookups
from gateway.metrics.distribution import Distribution


class CallCollector(Collector):
    """The figures of calls, by dialect."""

    def __init__(self, figures: Mapping[str, CallFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "weir_http_responses", "Responses, by dialect and HTTP status", labels=("dialect", "status")
        )
        in_flight = GaugeMetricFamily("weir_calls_in_flight", "Calls in flight", labels=["dialect"])
        ignoring = CounterMetricFamily(
            "weir_calls_with_ignored_fields",
            "Calls with fields that the gateway did not know, and ignored",
            labels=["dialect"],
        )
        first = _histogram("weir_first_token_seconds", "Seconds from a stream's request to its first token")
        gaps = _histogram(
            "weir_token_gap_seconds", "Seconds between two events of a stream, without heartbeats"
        )
        wait = _histogram("weir_engine_wait_seconds", "Seconds until an engine accepted an answer's request")
        parts = SummaryMetricFamily(
            "weir_part_seconds", "Seconds that each part of the calls took", labels=("dialect", "part")
        )
        for dialect, each in self._figures.items():
            for status, count in sorted(each.statuses.items()):
                responses.add_metric((dialect, str(status)), count)
            in_flight.add_metric([dialect], each.in_flight)
            ignoring.add_metric([dialect], each.ignoring)
            for family, found in ((first, each.first_token), (gaps, each.gaps), (wait, each.engine_wait)):
                _add(family, found, dialect)
            for part, spent in each.parts.items():
                parts.add_metric((dialect, part), spent.runs, spent.seconds)
        yield from (responses, in_flight, ignoring, first, gaps, wait, parts)


class DistributionCollector(Collector):
    """One histogram without labels."""

    def __init__(self, name: str, text: str, found: Distribution) -> None:
        self._name, self._text, self._distribution = name, text, found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=())
        _add(family, self._distribution)
        yield family


class CacheCollector(Collector):
    """The hits and misses of caches, by the cache's name."""

    def __init__(self) -> None:
        self.caches: dict[str, Callable[[], CacheLookups]] = {}

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "weir_cache_lookups", "Lookups in caches, by result", labels=("cache", "result")
        )
        for name, read in self.caches.items():
            hits, misses = read()
            lookups.add_metric((name, "hit"), hits)
            lookups.add_metric((name, "miss"), misses)
        yield lookups


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["dialect"])


def _add(family: HistogramMetricFamily, found: Distribution, *labels: str) -> None:
    bounds = [*map(floatToGoString, found.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, found.cumulative(), strict=True)), found.total)
