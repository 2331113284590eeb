"""The URLs at which the gateway reaches this server and its engine.

public_url, if it is set ─▶ else the host that is bound ─▶ else (0.0.0.0) the address towards the gateway
"""

import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from rollout_server.settings import WILDCARDS, RolloutServerSettings, http_url

ANY_PORT = 80


class Addresses(NamedTuple):
    """The URLs of the server and of its engine."""

    url: str
    engine_url: str


def addresses(settings: RolloutServerSettings) -> Addresses:
    """Looks up the gateway's name if need be, so it may take seconds. Raises OSError if that fails."""
    wildcard = "127.0.0.1"
    bound = [(settings.public_url, settings.host), (settings.engine_public_url, settings.engine_host)]
    if settings.gateway_url and any(url is None and host in WILDCARDS for url, host in bound):
        wildcard = address_towards(settings.gateway_url)
    return Addresses(
        settings.public_url or http_url(settings.host, settings.port, wildcard),
        settings.engine_public_url or http_url(settings.engine_host, settings.engine_port, wildcard),
    )


def address_towards(url: str) -> str:
    """This machine's own address on the way to a URL. Nothing is sent. Raises OSError."""
    parts = urlsplit(url)
    found = socket.getaddrinfo(parts.hostname, parts.port or ANY_PORT, type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
