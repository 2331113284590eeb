"""Turns tracing on for a process, and counts what became of its spans."""

import atexit
import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_queue.signals.tracing.counts import SpanCounts
from rollout_queue.signals.tracing.settings import OtelSettings
from rollout_queue.signals.tracing.spans import use_tracer

COUNTS = SpanCounts()


class SpanCollector(Collector):
    """Shows the counts to Prometheus."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "weir_trace_spans_exported", "Spans that the collector took", value=COUNTS.exported
        )
        dropped = CounterMetricFamily("weir_trace_spans_dropped", "Spans that are lost", labels=["why"])
        dropped.add_metric(["queue_full"], COUNTS.queue_full)
        dropped.add_metric(["not_taken"], COUNTS.not_taken)
        yield dropped


def show_spans(registry: CollectorRegistry) -> None:
    registry.register(SpanCollector())


def begin_tracing(settings: OtelSettings | None, service: str, sample_ratio: float | None = None) -> None:
    """Trace from now on, until the process ends, if `settings` are given. `service` is the name of the
    process in traces. `sample_ratio` replaces the one of the settings.

    Raises SystemExit if the extra `otel` is not installed.
    """
    if settings is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from rollout_queue.signals.tracing.otel import OtelTracer
    except ModuleNotFoundError as error:
        raise SystemExit(f"otel: install the extra `otel`: {error}") from error
    ratio = settings.sample_ratio if sample_ratio is None else sample_ratio
    tracer = OtelTracer(settings, service, ratio, COUNTS)
    use_tracer(tracer)
    atexit.register(tracer.close)
