"""HTTP clients in tests read no list of the world's authorities: tests call only this machine, without TLS.

httpx reads the list for each client, which takes 25 ms of CPU time, and many tests make clients.
"""

import os
import ssl
from pathlib import Path
from typing import Any, cast

VARIABLE = "SSL_CERT_FILE"
ONE = str(Path(__file__).with_name("authority.pem"))


def read_one_authority() -> None:
    """Have clients in this process, and in those that it starts, read a file with one certificate.

    Where the variable names a list already, processes that a test starts may need it to reach a package index
    through a proxy. So it stays, and this process alone reads the one certificate in its place.
    """
    world = os.environ.setdefault(VARIABLE, ONE)
    make = ssl.create_default_context

    def context(*purpose: ssl.Purpose, cafile: str | None = None, **more: Any) -> ssl.SSLContext:
        return make(*purpose, cafile=ONE if cafile == world else cafile, **more)

    if world != ONE:
        cast(Any, ssl).create_default_context = context
