"""Runs the reward service until SIGTERM: python -m reward_service [--config weir.yaml]."""

import argparse
import logging
import os

from pydantic import ValidationError

from reward_service.app import create_app
from reward_service.sandbox.secrets import hide_from_children
from reward_service.settings import RewardSettings
from rollout_queue.http.connections import ConnectionBounds
from rollout_queue.http.keys import Keyring, refuse_open_binding
from rollout_queue.http.server import serve
from rollout_queue.settings import CONFIG_VARIABLE

LAST_ANSWERS_S = 10.0
"""How long requests may still take after SIGTERM."""
CONNECTIONS = 256
"""Each may hold one body in memory."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="reward_service", description="Rewards sessions that have ended.")
    parser.add_argument("--config", metavar="FILE", help="weir.yaml; wins over WEIR_CONFIG")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx would log each call
    settings = _settings()
    refuse_open_binding(settings.host, Keyring(settings.client_keys, settings.admin_keys))
    hide_from_children()
    bounds = ConnectionBounds(in_all=CONNECTIONS, per_address=CONNECTIONS)
    try:
        app = create_app(settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"rewards.rules: {error}") from error
    serve(app, settings.host, settings.port, LAST_ANSWERS_S, bounds=bounds, loop="asyncio")


def _settings() -> RewardSettings:
    try:
        return RewardSettings()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SystemExit(f"rewards.{where}: {first['msg']}") from error


if __name__ == "__main__":
    main()
