"""How a service starts: it reads its command line, begins its log, and reads its settings."""

import argparse
import logging
import os
from typing import TypeVar

from rollout_queue.settings import CONFIG_VARIABLE, MalformedSettings, ServiceSettings, read_settings

S = TypeVar("S", bound=ServiceSettings)


def start(program: str, description: str, kind: type[S]) -> S:
    """The settings of the service whose process this is. Raises SystemExit with one sentence if they are
    wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", metavar="FILE", help=f"weir.yaml; wins over {CONFIG_VARIABLE}")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log each call
    try:
        return read_settings(kind)
    except MalformedSettings as error:
        raise SystemExit(str(error)) from error
