"""`python -m gateway`: read the configuration once, then serve."""

import argparse
import logging
import os

import uvicorn

from gateway.app import create_app
from gateway.settings import GatewaySettings
from rollout_queue.settings import CONFIG_VARIABLE
from rollout_queue.web.keys import Keyring, refuse_open_binding

logger = logging.getLogger("gateway")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gateway", description=__doc__)
    parser.add_argument("--config", help="weir.yaml")
    arguments = parser.parse_args()
    if arguments.config:
        os.environ[CONFIG_VARIABLE] = arguments.config
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = GatewaySettings()
    keyring = Keyring(settings.client_keys, settings.admin_keys)
    refuse_open_binding(settings.host, keyring)
    if keyring.open:
        logger.warning("no keys are set: everybody on this machine may do everything")
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        timeout_graceful_shutdown=30,
    )


if __name__ == "__main__":
    main()
