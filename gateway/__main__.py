"""`python -m gateway`: read the configuration once, then serve."""

import argparse
import ctypes
import gc
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from gateway.app import create_app
from gateway.callers.api_keys import ApiKeys, WrongKeyFile, configured_keys
from gateway.settings import GatewaySettings
from rollout_queue.http.callers import refuse_open_binding
from rollout_queue.http.http_server import ENDED_WITHIN_S, serve
from rollout_queue.http.worker_processes import Worker, bound_sockets, end_with_parent, run_workers
from rollout_queue.starting import begin, begin_tracing, command_line, one_sentence

logger = logging.getLogger("gateway")


YOUNG_OBJECTS = 20_000
"""So many new objects cause a garbage collection. Calls leave none; one in flight has some hundreds."""
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**20
"""glibc's number of the option, and its value: each larger block goes back to the system when it is freed."""
KILLED_AFTER_S = 10.0
"""How long a worker may take beyond its own time limits after SIGTERM, before it is killed."""


def main() -> None:
    parser = command_line("gateway", __doc__)
    parser.add_argument("--workers", type=int, help="processes that share the port; default: gateway.workers")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # set for each of several workers
    parser.add_argument("--sockets", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers is not None:
        os.environ["WEIR_GATEWAY__WORKERS"] = str(arguments.workers)
    process = "" if arguments.worker is None else f"worker {arguments.worker}"
    settings = begin(GatewaySettings, arguments.config, process)
    with one_sentence("", WrongKeyFile):
        keys = ApiKeys(configured_keys(settings))
    refuse_open_binding(settings.host, keys)
    if arguments.worker is not None:
        end_with_parent()
        serve_gateway(settings.share(), Worker(arguments.worker, settings.workers, arguments.sockets))
        return
    if keys.open:
        logger.warning("no keys are set: every process on this machine may do everything")
    if settings.workers == 1:
        serve_gateway(settings)
    else:
        sys.exit(run_gateways(settings))


def run_gateways(settings: GatewaySettings) -> int:
    """Run the gateway as several workers. Returns the exit status."""

    def command(worker: Worker) -> list[str]:
        own = ["--worker", str(worker.number), "--sockets", str(worker.folder)]
        return [sys.executable, "-m", "gateway", *own]

    stop_within_s = settings.leave_s + settings.drain_timeout_s + ENDED_WITHIN_S + KILLED_AFTER_S
    with one_sentence(f"cannot listen on {settings.host}:{settings.port}", OSError):
        return run_workers(settings.workers, settings.host, settings.port, command, stop_within_s)


def serve_gateway(settings: GatewaySettings, worker: Worker | None = None) -> None:
    """Serve in this process until SIGTERM."""
    begin_tracing(settings.otel, "weir-gateway")
    return_large_memory()
    app = create_app(settings, worker)
    # The objects built so far live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    # Long prompts are rendered in threads. A short switch interval lets streams write in between.
    sys.setswitchinterval(0.0001)
    serve(
        app,
        settings.host,
        settings.port,
        settings.drain_timeout_s,
        app.leave,
        bounds=settings.connections,
        end_requests=app.end_calls,
        access_log=settings.access_log,
        sockets=None if worker is None else bound_sockets(settings.host, settings.port, shared=True),
    )


def return_large_memory() -> None:
    """Let glibc always return the memory of large bodies. By default, it returns only the first."""
    with suppress(OSError, AttributeError):  # another C library, which has no such option
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


if __name__ == "__main__":
    main()
