"""The URLs at which the gateway reaches this server and its engine.

If `public_url` or `engine_public_url` is set, it is the URL. Otherwise the URL has the host on which the port
is bound. For a port that is bound on all addresses (0.0.0.0), it has the address from which this machine
reaches the gateway.
"""

from typing import NamedTuple

from rollout_queue.http.http_server import LOOPBACK_ADDRESS, WILDCARDS, address_towards, http_url
from rollout_server.settings import RolloutServerSettings


class Addresses(NamedTuple):
    """The URLs of the server and of its engine."""

    url: str
    engine_url: str


def addresses(settings: RolloutServerSettings) -> Addresses:
    """May look up the gateway's name, which can take seconds. Raises OSError if that fails."""
    wildcard = LOOPBACK_ADDRESS
    bound = [(settings.public_url, settings.host), (settings.engine_public_url, settings.engine_host)]
    if settings.gateway_url and any(url is None and host in WILDCARDS for url, host in bound):
        wildcard = address_towards(settings.gateway_url)
    return Addresses(
        settings.public_url or http_url(settings.host, settings.port, wildcard),
        settings.engine_public_url or http_url(settings.engine_host, settings.engine_port, wildcard),
    )
