"""HTTP clients in tests read no list of the world's authorities: tests call only this machine, without TLS.

httpx reads the list for each client, which takes 25 ms of CPU time, and many tests make clients.
"""

import os
from pathlib import Path


def read_one_authority() -> None:
    """Have clients in this process, and in those that it starts, read a file with one certificate."""
    os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("authority.pem")))
