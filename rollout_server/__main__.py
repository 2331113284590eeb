"""Runs one rollout server until SIGTERM: python -m rollout_server [--config weir.yaml]."""

import argparse
import logging
import os

from pydantic import ValidationError

from rollout_queue.http.keys import Keyring, refuse_open_binding
from rollout_queue.http.server import serve
from rollout_queue.settings import CONFIG_VARIABLE
from rollout_server.app import create_app
from rollout_server.engine.command import find_device
from rollout_server.engine.process import port_in_use
from rollout_server.server import build_server, port_message
from rollout_server.settings import RolloutServerSettings
from rollout_server.weights.claim import DirectoryTaken, claim_weights
from rollout_server.weights.safetensors_file import BrokenWeights
from rollout_server.weights.verify import ExpectedModel

LAST_ANSWERS_S = 3.0
"""How long requests to this server may still take after the engine has drained. The time is short, because a
reload has no use by then."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="rollout_server", description="Runs one SGLang engine.")
    parser.add_argument("--config", metavar="FILE", help="weir.yaml; wins over WEIR_CONFIG")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log each probe of the engine
    settings = _settings()
    keyring = Keyring(admin_keys=settings.admin_keys)
    refuse_open_binding(settings.host, keyring)
    _refuse_what_cannot_work(settings)
    try:
        claim = claim_weights(settings)
    except (DirectoryTaken, OSError) as error:
        raise SystemExit(f"rollout_server.weights_dir: {error}") from error
    server = build_server(settings, find_device(settings.engine_device), claim.directory)
    serve(create_app(server, keyring), settings.host, settings.port, LAST_ANSWERS_S, server.leave)


def _settings() -> RolloutServerSettings:
    try:
        return RolloutServerSettings()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SystemExit(f"rollout_server.{where}: {first['msg']}") from error


def _refuse_what_cannot_work(settings: RolloutServerSettings) -> None:
    """End the process with one sentence if the engine would fail at every start."""
    try:
        ExpectedModel.of(settings.model_path)
    except (BrokenWeights, OSError) as error:
        raise SystemExit(f"rollout_server.model_path is not a model that can be served: {error}") from error
    for host, port, field in (
        (settings.host, settings.port, "port"),
        (settings.engine_host, settings.engine_port, "engine_port"),
    ):
        if port_in_use(host, port):
            raise SystemExit(port_message(host, port, field))


if __name__ == "__main__":
    main()
