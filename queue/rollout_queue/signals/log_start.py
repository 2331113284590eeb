"""Begins the log of a service's process, in the form that its settings choose."""

import logging
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from rollout_queue.settings import ServiceSettings
from rollout_queue.signals.log_format import JsonFormatter, SecretFilter, TextFormatter

SECRET_FIELDS = frozenset(
    {"client_keys", "admin_keys", "api_key", "rollout_server_key", "trainer_key", "engine_key"}
)
logger = logging.getLogger("weir")


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
    for each in logging.root.manager.loggerDict.values():
        if isinstance(each, logging.Logger) and each.handlers:
            each.handlers.clear()
            each.propagate = True


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logger.critical("the process ends with an exception", exc_info=(kind, error, trace))


def _log_end_of_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None:
        where = given.thread.name if given.thread else "unknown"
        trace = (given.exc_type, given.exc_value, given.exc_traceback)
        logger.error("thread %s ends with an exception", where, exc_info=trace)
