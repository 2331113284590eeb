"""The servers that tests can start: the one that all tests use, and those that `make run/servers` unpacks."""

from pathlib import Path

import pytest

from tests.support.redis_process import redis_executable

SERVERS = Path(__file__).parents[3] / "run" / "servers"
UNPACKED = ("redis-7", "valkey-8")
"""Debian's builds, which can do TLS; the wheel that tests use by default cannot."""
KINDS = ("default", *UNPACKED)


def program_of(kind: str) -> str:
    """The program of this kind of server. Skips the test if it is not on this machine."""
    if kind == "default":
        return redis_executable()
    program = SERVERS / kind / "server"
    if not program.exists():
        pytest.skip(f"{kind} is not here: `make redis-servers` unpacks it from Debian's archive")
    return str(program)
