"""How a service starts: it reads its command line and its settings, and begins its log."""

import argparse
import os
from typing import TypeVar

from rollout_queue.settings import CONFIG_VARIABLE, MalformedSettings, ServiceSettings, read_settings
from rollout_queue.signals.log_start import begin_log

S = TypeVar("S", bound=ServiceSettings)


def start(program: str, description: str, kind: type[S]) -> S:
    """The settings of the service whose process this is. Raises SystemExit with one sentence if they are
    wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", metavar="FILE", help=f"weir.yaml; wins over {CONFIG_VARIABLE}")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    try:
        settings = read_settings(kind)
    except MalformedSettings as error:
        raise SystemExit(str(error)) from error
    begin_log(settings)
    return settings
