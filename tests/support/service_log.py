"""The log of a service that runs in this process."""

import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollout_queue.service_log import begin_log_ids
from rollout_queue.settings import ServiceSettings
from rollout_queue.starting import begin_log


@contextmanager
def log_of(settings: ServiceSettings, process: str = "") -> Iterator[io.StringIO]:
    """What a service with these settings writes to standard error. Afterwards, the log is as before."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    level, httpx_level = root.level, logging.getLogger("httpx").level
    begin_log(settings, process)
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    written = io.StringIO()
    handler.setStream(written)
    try:
        yield written
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level)
        logging.getLogger("httpx").setLevel(httpx_level)
        sys.excepthook, threading.excepthook = hooks
        begin_log_ids()
