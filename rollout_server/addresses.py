"""The URLs at which the gateway reaches this server and its engine.

public_url, if it is set ─▶ else the host that is bound ─▶ else (0.0.0.0) the address towards the gateway
"""

from typing import NamedTuple

from rollout_queue.http.addresses import LOOPBACK_ADDRESS, WILDCARDS, address_towards, http_url
from rollout_server.settings import RolloutServerSettings


class Addresses(NamedTuple):
    """The URLs of the server and of its engine."""

    url: str
    engine_url: str


def addresses(settings: RolloutServerSettings) -> Addresses:
    """Looks up the gateway's name if need be, so it may take seconds. Raises OSError if that fails."""
    wildcard = LOOPBACK_ADDRESS
    bound = [(settings.public_url, settings.host), (settings.engine_public_url, settings.engine_host)]
    if settings.gateway_url and any(url is None and host in WILDCARDS for url, host in bound):
        wildcard = address_towards(settings.gateway_url)
    return Addresses(
        settings.public_url or http_url(settings.host, settings.port, wildcard),
        settings.engine_public_url or http_url(settings.engine_host, settings.engine_port, wildcard),
    )
