"""Spans of OpenTelemetry's SDK, sent over OTLP by a thread of their own.

begin ──▶ SDK's span ──end──▶ queue (bounded; what does not fit is counted) ──▶ thread ──▶ collector
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextvars import copy_context
from itertools import islice
from random import random
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rollout_queue import clock
from rollout_queue.tracing import (
    MOST_CHARACTERS,
    MOST_LINKS,
    TRACEPARENT,
    Attributes,
    Kind,
    OtelSettings,
    SpanCounts,
)

logger = logging.getLogger(__name__)

BATCH_SPANS: Final = 256
"""Of one request to the collector, at most."""
CLOSE_WITHIN_S: Final = 3.0
"""How long the end of the process waits for the last spans."""
KINDS: Final[dict[Kind, SpanKind]] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


class OtelTracer:
    """Begins spans; `close` sends the last ones."""

    def __init__(self, settings: OtelSettings, service: str, sample_ratio: float, counts: SpanCounts) -> None:
        # The exporter would log each failure; this module logs the first one, and all are counted.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(
            endpoint=settings.traces_url, headers=settings.headers or None, timeout=settings.timeout_s
        )
        named = {} if os.environ.get(OTEL_SERVICE_NAME) else {SERVICE_NAME: service}
        own: dict[str, str | int] = {**named, "service.namespace": "weir", "process.pid": os.getpid()}
        # The SDK's sampler costs as much as a span. Ours decides before the SDK is asked.
        self._ratio = None if os.environ.get(OTEL_TRACES_SAMPLER) else sample_ratio
        sampler = None if self._ratio is None else ALWAYS_ON
        provider = TracerProvider(sampler=sampler, resource=Resource.create(own), shutdown_on_exit=False)
        self._queue = SpanQueue(exporter, settings, counts)
        provider.add_span_processor(self._queue)
        self._tracer = provider.get_tracer("weir")

    def begin(self, name: str, kind: Kind, parent: str | None, links: Iterable[str]) -> "OtelSpan | None":
        if self._ratio is not None and not _sampled(parent, self._ratio):
            return None
        above, context = None if parent is None else _context_of(parent), Context()
        if above is not None:
            context = trace.set_span_in_context(NonRecordingSpan(above), context)
        linked = [Link(each) for each in map(_context_of, islice(links, MOST_LINKS)) if each is not None]
        made = self._tracer.start_span(name, context, KINDS[kind], links=linked)
        return OtelSpan(made) if made.is_recording() else None

    def close(self) -> None:
        self._queue.shutdown()


class OtelSpan:
    """A span that is sampled."""

    __slots__ = ("_span",)

    def __init__(self, made: trace.Span) -> None:
        self._span = made

    @property
    def traceparent(self) -> str:
        own = self._span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-01"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(
            {
                name: value[:MOST_CHARACTERS] if isinstance(value, str) else value
                for name, value in attributes.items()
                if value is not None
            }
        )

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        self._span.end()


class SpanQueue(SpanProcessor):
    """Spans that wait for their export. `on_end` never waits."""

    def __init__(self, exporter: SpanExporter, settings: OtelSettings, counts: SpanCounts) -> None:
        self._exporter, self._counts = exporter, counts
        self._most, self._every_s = settings.queue_spans, settings.export_every_s
        self._waiting: deque[ReadableSpan] = deque()
        self._wake, self._closed = threading.Event(), False
        self._failing = False
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="traces", daemon=True
        )
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._waiting) >= self._most:
            self._counts.queue_full += 1
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS and not self._wake.is_set():
            self._wake.set()

    def shutdown(self) -> None:
        """Send what waits, for a bounded time."""
        self._closed = True
        self._wake.set()
        self._thread.join(CLOSE_WITHIN_S)
        self._exporter.shutdown()  # ends an export that still runs

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        self._wake.set()
        return True

    def _run(self) -> None:
        closed = False
        while not closed:
            clock.wait(self._wake, self._every_s)
            self._wake.clear()
            closed = self._closed  # before the spans are sent, so that none ends in between
            while self._waiting:
                self._export()

    def _export(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # whatever happens here concerns no call
            taken = False
        if taken:
            self._counts.exported += len(batch)
        else:
            self._counts.not_taken += len(batch)
        if taken is self._failing:
            self._failing = not taken
            logger.warning("the collector of traces %s", "takes spans again" if taken else "takes no spans")


def _sampled(parent: str | None, ratio: float) -> bool:
    """A span follows its parent; of roots, a share is sampled."""
    return random() < ratio if parent is None else int(parent[-1], 16) % 2 == 1


def _context_of(traceparent: str) -> SpanContext | None:
    if TRACEPARENT.fullmatch(traceparent) is None:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
