"""A collector of traces: it decodes what arrives over OTLP, and keeps the spans."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.serving import serving
from tests.support.waiting import wait_until

ARRIVES_WITHIN_S = 300.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it was sent. Ids are in hex."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """The span ids."""
    error: bool


@dataclass
class OtlpReceiver:
    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The header `x-collector-key` of each request."""

    def named(self, name: str, service: str = "") -> list[ReceivedSpan]:
        return [each for each in self.spans if each.name == name and each.service.endswith(service)]

    def wait_for(self, name: str, service: str = "", count: int = 1) -> list[ReceivedSpan]:
        wait_until(lambda: len(self.named(name, service)) >= count, ARRIVES_WITHIN_S)
        return self.named(name, service)

    async def take(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert request.headers["content-type"] == "application/x-protobuf"
        self.keys.append(request.headers.get("x-collector-key"))
        self.spans += spans_of(body)
        return Response(b"", media_type="application/x-protobuf")


def spans_of(body: bytes) -> Iterator[ReceivedSpan]:
    sent = ExportTraceServiceRequest.FromString(body)
    for resource in sent.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service=service,
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    attributes=_values(span.attributes),
                    links=tuple(link.span_id.hex() for link in span.links),
                    error=span.status.code == 2,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    with serving(Starlette(routes=[Route("/v1/traces", receiver.take, methods=["POST"])])) as url:
        receiver.url = url
        yield receiver
