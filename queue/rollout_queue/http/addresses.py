"""The URL at which other machines reach a port of this one."""

import socket
from urllib.parse import urlsplit

LOOPBACK_ADDRESS = "127.0.0.1"
WILDCARDS = ("0.0.0.0", "::")
ANY_PORT = 80


def http_url(host: str, port: int, wildcard: str = LOOPBACK_ADDRESS) -> str:
    """The URL of a port that is bound on `host`. If that means all addresses, the URL has `wildcard`."""
    host = wildcard if host in WILDCARDS else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def address_towards(url: str) -> str:
    """This machine's own address on the way to a URL. Nothing is sent; the URL's host may be looked up.

    Raises OSError.
    """
    parts = urlsplit(url)
    if not parts.hostname:  # a socket in the file system
        return LOOPBACK_ADDRESS
    found = socket.getaddrinfo(parts.hostname, parts.port or ANY_PORT, type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
