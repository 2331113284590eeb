"""Traces of one process: what is sent, what is dropped, and that nothing is there without the setting."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

from rollout_queue.otel import BATCH_SPANS, OtelTracer, SpanQueue
from rollout_queue.starting import COUNTS, begin_tracing, show_spans
from rollout_queue.tracing import (
    MOST_LINKS,
    OtelSettings,
    SpanCounts,
    current_span,
    span,
    trace_headers,
    use_tracer,
)
from tests.support.observe.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.serving import free_port
from tests.support.waiting import PATIENCE_S, wait_until

SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"
UNSAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as started:
        yield started


@pytest.fixture
def counts() -> SpanCounts:
    return SpanCounts()


@contextmanager
def tracing(settings: OtelSettings, counts: SpanCounts, ratio: float = 1) -> Iterator[None]:
    """Everything in the block is traced; at its end, the spans are sent."""
    tracer = OtelTracer(settings, "weir-test", ratio, counts)
    use_tracer(tracer)
    try:
        yield
    finally:
        use_tracer(None)
        tracer.close()


@pytest.fixture
def traced(receiver: OtlpReceiver, counts: SpanCounts) -> Iterator[OtlpReceiver]:
    """Everything is traced, to the receiver."""
    receiver.spans.clear()
    with tracing(OtelSettings(endpoint=receiver.url, export_every_s=0.02), counts):
        yield receiver


def test_a_span_lies_under_the_present_one_or_under_another_services(traced: OtlpReceiver) -> None:
    with span("call", "server", parent=SAMPLED, root=True), span("engine", "client") as engine:
        assert trace_headers() == {"traceparent": engine.traceparent}
        engine.set({"text": "x" * 10_000, "none": None, "some": ["a"]})
    assert trace_headers() == {}
    (call,), (engine_span,) = traced.wait_for("call"), traced.wait_for("engine")
    assert (call.trace_id, call.parent_id) == ("a" * 32, "b" * 16)
    assert (engine_span.trace_id, engine_span.parent_id) == (call.trace_id, call.span_id)
    assert len(engine_span.attributes.pop("text")) == 256
    assert engine_span.attributes == {"some": ["a"]}
    assert call.service == "weir-test"


def test_work_that_fails_is_an_error_and_says_no_more_than_its_class(traced: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="a prompt"), span("call", root=True):
        raise ValueError("a prompt")
    (call,) = traced.wait_for("call")
    assert call.error
    assert call.attributes == {"error.type": "ValueError"}


def test_what_the_caller_does_not_sample_is_not_traced(traced: OtlpReceiver) -> None:
    with span("call", parent=UNSAMPLED, root=True) as call, span("engine") as engine:
        assert not call.recording
        assert not engine.recording
        assert trace_headers() == {}
    with span("later", root=True):
        pass
    traced.wait_for("later")
    assert not traced.named("call")


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "00-" + "0" * 32 + "-" + "b" * 16 + "-01", SAMPLED + "\n"]
)
def test_a_malformed_context_begins_a_trace_of_its_own(traced: OtlpReceiver, parent: str) -> None:
    with span("call", parent=parent, root=True):
        pass
    (call,) = traced.wait_for("call")
    assert call.parent_id == ""


def test_what_is_no_root_has_no_span_without_a_parent(traced: OtlpReceiver) -> None:
    with span("push") as push:
        assert not push.recording
    assert current_span().traceparent is None
    assert traced.spans == []


def test_links_are_bounded(traced: OtlpReceiver) -> None:
    links = [f"00-{'a' * 32}-{number:016x}-01" for number in range(1, 1000)]
    with span("step", root=True, links=["nonsense", *links]):
        pass
    (step,) = traced.wait_for("step")
    assert 1 < len(step.links) <= MOST_LINKS
    assert step.links[0] == f"{1:016x}"


def test_the_standard_variables_are_obeyed(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.spans.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=of-the-variable")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-gateway")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    with tracing(OtelSettings(export_every_s=0.02), SpanCounts(), ratio=0), span("call", root=True):
        pass
    (call,) = receiver.wait_for("call")
    assert call.service == "my-gateway"
    assert receiver.keys[-1] == "of-the-variable"


def test_the_sdk_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    begin_tracing(OtelSettings(sample_ratio=1), "weir-test")
    with span("call", root=True) as call:
        assert not call.recording


class Hanging(SpanExporter):
    """A collector that does not answer until it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go_on.wait(300)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.go_on.set()


def test_spans_that_do_not_fit_are_dropped_and_counted(counts: SpanCounts) -> None:
    collector = Hanging()
    waiting = SpanQueue(collector, OtelSettings(queue_spans=10, export_every_s=0.01), counts)
    waiting.on_end(ReadableSpan("first"))
    assert collector.asked.wait(300)
    for _ in range(15):
        waiting.on_end(ReadableSpan("more"))  # would hang here if it waited
    assert counts.queue_full == 5
    collector.go_on.set()
    wait_until(lambda: counts.exported == 11)
    waiting.shutdown()
    assert counts.not_taken == 0


def test_the_last_spans_are_sent_when_the_process_ends(
    receiver: OtlpReceiver, counts: SpanCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_queue.otel.CLOSE_WITHIN_S", PATIENCE_S)
    receiver.spans.clear()
    with tracing(OtelSettings(endpoint=receiver.url, export_every_s=3600), counts):
        for _ in range(BATCH_SPANS + 1):
            with span("call", root=True):
                pass
    assert len(receiver.named("call")) == BATCH_SPANS + 1 == counts.exported


def test_a_dead_collector_changes_nothing_but_a_count(counts: SpanCounts) -> None:
    settings = OtelSettings(
        endpoint=f"http://127.0.0.1:{free_port()}", export_every_s=0.01, timeout_s=0.2, queue_spans=4
    )
    with tracing(settings, counts):
        while not counts.queue_full:
            with span("call", root=True):
                pass
        wait_until(lambda: counts.not_taken > 0)
    assert counts.exported == 0


def test_prometheus_sees_what_became_of_the_spans() -> None:
    registry = CollectorRegistry()
    show_spans(registry)
    text = generate_latest(registry).decode()
    assert f"weir_trace_spans_exported_total {float(COUNTS.exported)}" in text
    assert 'weir_trace_spans_dropped_total{why="queue_full"} ' in text
    assert 'weir_trace_spans_dropped_total{why="not_taken"} ' in text
