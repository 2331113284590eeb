"""`python -m gateway`: read the configuration once, then serve."""

import argparse
import ctypes
import gc
import logging
import os
import sys
from contextlib import suppress

from gateway.app import create_app
from gateway.keys.api_keys import ApiKeys, configured_keys
from gateway.keys.key_file import WrongKeyFile
from gateway.settings import GatewaySettings
from rollout_queue.http.keys import refuse_open_binding
from rollout_queue.http.server import serve
from rollout_queue.settings import CONFIG_VARIABLE

logger = logging.getLogger("gateway")


M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**20
"""glibc's number of the option, and its value: each larger block goes back to the system when it is freed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="gateway", description=__doc__)
    parser.add_argument("--config", help="weir.yaml")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = GatewaySettings()
    try:
        keys = ApiKeys(configured_keys(settings))
    except WrongKeyFile as error:
        raise SystemExit(str(error)) from error
    refuse_open_binding(settings.host, keys)
    if keys.open:
        logger.warning("no keys are set: every process on this machine may do everything")
    return_large_memory()
    app = create_app(settings)
    # The objects built so far live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
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
    )


def return_large_memory() -> None:
    """Let glibc always return the memory of large bodies. By default, it returns only the first."""
    with suppress(OSError, AttributeError):  # another C library, which has no such option
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


if __name__ == "__main__":
    main()
