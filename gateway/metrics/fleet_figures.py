"""What is measured of the fleet: where calls went, what their prefixes saved, and the load of the engines."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


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


class FleetCollector(Collector):
    """Gives Prometheus the figures of the fleet. `read` is None until there is a fleet."""

    def __init__(self, tokens: PromptTokens) -> None:
        self.read: Callable[[], FleetFigures] | None = None
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        yield _counter("weir_prompt_tokens", "Tokens of the prompts of recorded turns", self._tokens.prompt)
        text = "Tokens of these prompts that the engine had in its cache"
        yield _counter("weir_cached_prompt_tokens", text, self._tokens.cached)
        if self.read is None:
            return
        found = self.read()
        placed = CounterMetricFamily(
            "weir_placements", "Calls sent to a server, by reason", labels=["reason"]
        )
        for reason, count in sorted(found.placed.items()):
            placed.add_metric([reason], count)
        yield placed
        yield _gauge("weir_calls_waiting", "Calls that wait for a server in this gateway", found.waiting)
        yield _gauge("weir_engine_running", "Requests that run in the ready engines", found.running)
        yield _gauge("weir_engine_queued", "Requests that wait in the ready engines", found.queued)
        if found.kv_usage is not None:
            text = "Mean share of the ready engines' key-value caches that running requests have"
            yield _gauge("weir_engine_kv_usage", text, found.kv_usage)
        if found.limit is not None:
            yield _gauge("weir_engine_limit", "Sum of the ready servers' limits of calls", found.limit)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
