"""How a service starts: it reads its command line and settings, begins its log and its traces, and serves.

    serve_main: start ─▶ settings ─▶ keys ─▶ refuse_open_binding ─▶ build ─▶ serve, until SIGTERM

The gateway, which may be several processes, and the trainer, which trains on its main thread, call these
functions themselves. Whatever cannot work ends the process with one sentence.
"""

import argparse
import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from rollout_queue.config_file import CONFIG_VARIABLE, MalformedSettings, config_file
from rollout_queue.http.bounded_protocol import ConnectionBounds
from rollout_queue.http.callers import Keyring, refuse_open_binding
from rollout_queue.http.http_server import Leave, serve
from rollout_queue.service_log import JsonFormatter, SecretFilter, TextFormatter
from rollout_queue.settings import HttpSettings, ServiceSettings, check_names, read_settings
from rollout_queue.tracing import OtelSettings, SpanCounts, use_tracer

logger = logging.getLogger(__name__)


SECRET_FIELDS = frozenset(
    {"client_keys", "admin_keys", "api_key", "rollout_server_key", "trainer_key", "engine_key"}
)
process_logger = logging.getLogger("weir")


def begin_log(settings: ServiceSettings, process: str = "") -> None:
    """Log to standard error from now on. `process` distinguishes processes of one service.

    In JSON, libraries write their lines there as well, and so do warnings and the exception that ends a
    thread or the process.
    """
    secrets = SecretFilter(secrets_of(settings.model_dump()))
    in_json = settings.log_format == "json"
    handler = logging.StreamHandler()
    handler.setFormatter((JsonFormatter if in_json else TextFormatter)(secrets, process))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.handlers[:] = [handler]
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log each call
    if in_json:
        _take_over_libraries()
        logging.captureWarnings(True)
        sys.excepthook = _log_end
        threading.excepthook = _log_end_of_thread


def secrets_of(values: Any, name: str = "") -> Iterator[str]:
    """The keys and passwords in a dump of settings."""
    if isinstance(values, dict):
        for inner, value in values.items():
            yield from secrets_of(value, name if name == "headers" else inner)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from secrets_of(value, name)
    elif isinstance(values, str) and name in {*SECRET_FIELDS, "headers"}:
        yield values


def _take_over_libraries() -> None:
    """Have the loggers of libraries that write by themselves pass their lines on to the root's handler."""
    for each in list(logging.root.manager.loggerDict.values()):  # other threads make loggers meanwhile
        if isinstance(each, logging.Logger) and each.handlers:
            each.handlers.clear()
            each.propagate = True


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    process_logger.critical("the process ends with an exception", exc_info=(kind, error, trace))


def _log_end_of_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None:
        where = given.thread.name if given.thread else "unknown"
        trace = (given.exc_type, given.exc_value, given.exc_traceback)
        process_logger.error("thread %s ends with an exception", where, exc_info=trace)


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
        from rollout_queue.otel import OtelTracer
    except ModuleNotFoundError as error:
        raise SystemExit(f"otel: install the extra `otel`: {error}") from error
    ratio = settings.sample_ratio if sample_ratio is None else sample_ratio
    tracer = OtelTracer(settings, service, ratio, COUNTS)
    use_tracer(tracer)
    atexit.register(tracer.close)


S = TypeVar("S", bound=ServiceSettings)
H = TypeVar("H", bound=HttpSettings)


class Serving(NamedTuple):
    """What a process serves; the fields are arguments of `serve`."""

    app: ASGIApp
    drain_s: float
    leave: Leave | None = None
    bounds: ConnectionBounds | None = None
    loop: Literal["uvloop", "asyncio"] = "uvloop"


def serve_main(
    program: str,
    description: str,
    kind: type[H],
    keys: Callable[[H], Keyring],
    build: Callable[[H, Keyring], Serving],
) -> None:
    """The `main` of a service that is one HTTP server: serve until SIGTERM what `build` makes. Raises
    SystemExit with one sentence if that cannot work."""
    settings = start(program, description, kind)
    keyring = keys(settings)
    refuse_open_binding(settings.host, keyring)
    service = build(settings, keyring)
    serve(
        service.app,
        settings.host,
        settings.port,
        service.drain_s,
        service.leave,
        service.bounds,
        loop=service.loop,
        access_log=settings.access_log,
    )


@contextmanager
def one_sentence(where: str, *errors: type[Exception]) -> Iterator[None]:
    """End the process with one sentence if the block raises one of these errors. `where`: what to change."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"{where}: {error}" if where else str(error)) from error


def start(program: str, description: str, kind: type[S]) -> S:
    """The settings of the service whose process this is. Raises SystemExit with one sentence if they are
    wrong."""
    return begin(kind, command_line(program, description).parse_args().config)


def command_line(program: str, description: str | None) -> argparse.ArgumentParser:
    """The options that all services have."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", metavar="FILE", help=f"weir.yaml; wins over {CONFIG_VARIABLE}")
    return parser


def begin(kind: type[S], config: str | None, process: str = "") -> S:
    """The settings of a service, with its log begun; `config` is the file that its command line names, and
    `process` distinguishes processes of one service. Raises SystemExit."""
    if config:
        os.environ[CONFIG_VARIABLE] = config
    with one_sentence("", MalformedSettings):
        settings = read_settings(kind)
        unread = check_names(kind)
    begin_log(settings, process)
    if not process:
        logger.info("configuration: %s", config_file() or "no file, only variables and defaults")
        for sentence in unread:
            logger.warning("%s", sentence)
    return settings
