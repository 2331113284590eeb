"""The spans of HTTP requests that a service answers."""

from collections.abc import Callable

from starlette.types import Scope

from rollout_queue.signals.log_ids import LogIds
from rollout_queue.signals.tracing.spans import NOTHING, TraceSpan, span, tracing_is_on


def request_span(scope: Scope, path: str | None, known: Callable[[], bool]) -> TraceSpan:
    """The span of a request, under the caller's `traceparent` if it has one and the caller is `known`: others
    do not decide what is traced. Without one, a request of a `path` that is known here begins a trace, and
    any other request has no span."""
    if not tracing_is_on():
        return NOTHING
    given = next((value for name, value in scope["headers"] if name == b"traceparent"), None)
    parent = None if given is None or not known() else given.decode("latin-1")
    named = scope["method"] if path is None else f"{scope['method']} {path}"
    return span(named, "server", parent=parent, root=path is not None)


def describe_request(traced: TraceSpan, scope: Scope, path: str, status: int, ids: LogIds) -> None:
    """What is known of a request once it is answered."""
    if not traced.recording:
        return
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
