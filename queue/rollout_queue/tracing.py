"""Spans: what services call to trace their work. Without tracing, each call returns at once.

with span("rl.step", root=True) as step:        a span that the block is in; `step.set(…)` adds attributes
trace_headers()                                 carries the present span to another service

OtelSettings say where traces are sent, and how many; SpanCounts, what became of the spans of this process.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import Field
from starlette.types import Scope

from rollout_queue.service_log import LogIds, path_template
from rollout_queue.settings import PlainUrl, SettingsPart


class OtelSettings(SettingsPart):
    """Section `otel` of a service. With `{}`, the standard variables `OTEL_EXPORTER_OTLP_…` say where to."""

    endpoint: PlainUrl | None = None
    """The collector's address for OTLP over HTTP: http://host:4318, or a whole URL with its path. Null: what
    OTEL_EXPORTER_OTLP_ENDPOINT says."""
    sample_ratio: float = Field(0.01, ge=0, le=1)
    """The share of the agents' calls that begin a trace. A call with a `traceparent` and a known key
    follows that instead, and the trainer's steps are always traced. OTEL_TRACES_SAMPLER counts first."""
    headers: dict[str, str] = {}
    """Headers for the collector, such as a key."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """How long one export may take."""
    queue_spans: int = Field(2048, ge=1, le=2**17)
    """Spans that wait for their export. More are dropped, and counted."""
    export_every_s: float = Field(2.0, gt=0)
    """The pause between two exports."""

    @property
    def traces_url(self) -> str | None:
        """Where spans are posted to; None leaves it to the standard variables."""
        if self.endpoint is None:
            return None
        path = urlsplit(self.endpoint).path.rstrip("/")
        return self.endpoint if path else self.endpoint.rstrip("/") + "/v1/traces"


T = TypeVar("T")
Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | list[str]
Attributes = Mapping[str, Value | None]
TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
MOST_LINKS = 128
"""Of one span."""
MOST_CHARACTERS = 256
"""Of one attribute: ids may come from clients."""


class Begun(Protocol):
    """A span of the tracer, which its end is to be told."""

    @property
    def traceparent(self) -> str:
        """The span as W3C's header."""
        ...

    def set(self, attributes: Attributes) -> None: ...
    def rename(self, name: str) -> None: ...
    def fail(self, kind: str) -> None:
        """The work failed; `kind` is an error's class, or a status."""
        ...

    def end(self) -> None: ...


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, name: str, kind: Kind, parent: str | None, links: Iterable[str]) -> Begun | None:
        """A span under `parent` (a traceparent), or a root; None if it is not sampled."""
        ...


_tracer: Tracer | None = None
_current: ContextVar["TraceSpan | None"] = ContextVar("span", default=None)


def use_tracer(tracer: Tracer | None) -> None:
    """From now on, this process traces with this tracer; None turns tracing off."""
    global _tracer
    _tracer = tracer


class TraceSpan:
    """A block of work. `recording` is False if nothing of it is kept: compute no attributes then."""

    __slots__ = ("_begun", "_token", "recording")

    def __init__(self, begun: Begun | None) -> None:
        self._begun, self.recording = begun, begun is not None
        self._token: Token[TraceSpan | None] | None = None

    @property
    def traceparent(self) -> str | None:
        return None if self._begun is None else self._begun.traceparent

    def set(self, attributes: Attributes) -> None:
        """Add attributes; those of None are left out."""
        if self._begun is not None:
            self._begun.set(attributes)

    def rename(self, name: str) -> None:
        if self._begun is not None:
            self._begun.rename(name)

    def fail(self, kind: str) -> None:
        if self._begun is not None:
            self._begun.fail(kind)

    def __enter__(self) -> "TraceSpan":
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        if self._begun is not None:
            if kind is not None:
                self._begun.fail(kind.__qualname__)
            self._begun.end()


class _Nothing(TraceSpan):
    """The span of work that is not traced. All such work shares it. It does not become the present one."""

    __slots__ = ()

    def __enter__(self) -> "TraceSpan":
        return self

    def __exit__(self, *_: object) -> None:
        return


NOTHING: TraceSpan = _Nothing(None)


def span(
    name: str,
    kind: Kind = "internal",
    *,
    parent: str | None = None,
    root: bool = False,
    links: Iterable[str] = (),
) -> TraceSpan:
    """The span of a block. It lies under `parent` (a traceparent of another service), else under the present
    span. If there is neither, a span that may be a `root` begins a trace."""
    tracer = _tracer
    if tracer is None:
        return NOTHING
    if parent is not None and TRACEPARENT.fullmatch(parent) is None:
        parent = None
    if parent is None:
        current = _current.get()
        if current is not None:
            parent = current.traceparent
            if parent is None:
                return NOTHING  # its root was not sampled
        elif not root:
            return NOTHING
    begun = tracer.begin(name, kind, parent, links)
    return TraceSpan(begun) if begun is not None or root else NOTHING


def current_span() -> TraceSpan:
    return _current.get() or NOTHING


def traceparent() -> str | None:
    """The present span as W3C's header; None without one that is sampled."""
    return None if _tracer is None else current_span().traceparent


def trace_headers() -> dict[str, str]:
    """The headers that carry the present span to another service."""
    found = traceparent()
    return {} if found is None else {"traceparent": found}


def in_span(name: str, parent: str | None, attributes: Attributes, work: Callable[[], T]) -> T:
    """Do the work in a span, on whichever thread this is."""
    with span(name, parent=parent) as begun:
        begun.set(attributes)
        return work()


@dataclass
class SpanCounts:
    """Of this process, since it started."""

    exported: int = 0
    queue_full: int = 0
    """Dropped, because as many wait as may wait."""
    not_taken: int = 0
    """Dropped, because the collector did not take them."""


def request_span(scope: Scope, path: str | None, known: Callable[[], bool]) -> TraceSpan:
    """The span of a request, under the caller's `traceparent` if it has one and the caller is `known`: others
    do not decide what is traced. Without one, a request of a `path` that is known here begins a trace, and
    any other request has no span."""
    if _tracer is None:
        return NOTHING
    given = next((value for name, value in scope["headers"] if name == b"traceparent"), None)
    parent = None if given is None or not known() else given.decode("latin-1")
    named = scope["method"] if path is None else f"{scope['method']} {path}"
    return span(named, "server", parent=parent, root=path is not None)


def describe_request(traced: TraceSpan, scope: Scope, status: int, ids: LogIds) -> None:
    """What is known of a request once it is answered."""
    if not traced.recording:
        return
    path = path_template(scope)
    traced.rename(f"{scope['method']} {path}")
    traced.set(
        {
            "http.request.method": scope["method"],
            "http.route": path,
            "http.response.status_code": status,
            "url.scheme": scope.get("scheme"),
            "gen_ai.conversation.id": ids.session_id,
            "rl.request.id": ids.request_id,
            "rl.key.name": ids.key,
        }
    )
    if status >= 500:
        traced.fail(str(status))
