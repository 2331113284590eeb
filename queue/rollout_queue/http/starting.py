"""How a service starts: it reads its command line and its settings, and begins its log."""

import argparse
import logging
import os
from typing import TypeVar

from rollout_queue.config_file import CONFIG_VARIABLE, MalformedSettings, config_file
from rollout_queue.settings import ServiceSettings, check_names, read_settings
from rollout_queue.signals.log_start import begin_log

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=ServiceSettings)


def start(program: str, description: str, kind: type[S]) -> S:
    """The settings of the service whose process this is. Raises SystemExit with one sentence if they are
    wrong."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", metavar="FILE", help=f"weir.yaml; wins over {CONFIG_VARIABLE}")
    return begin(kind, parser.parse_args().config)


def begin(kind: type[S], config: str | None, process: str = "") -> S:
    """The settings of a service, with its log begun; `config` is the file that its command line names, and
    `process` distinguishes processes of one service. Raises SystemExit."""
    if config:
        os.environ[CONFIG_VARIABLE] = config
    try:
        settings = read_settings(kind)
        unread = check_names(kind)
    except MalformedSettings as error:
        raise SystemExit(str(error)) from error
    begin_log(settings, process)
    if not process:
        logger.info("configuration: %s", config_file() or "no file, only variables and defaults")
        for sentence in unread:
            logger.warning("%s", sentence)
    return settings
