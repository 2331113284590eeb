"""One worker of a service: its number, its sockets, and its end when the parent process ends."""

import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Worker:
    """A process that serves a share of the connections to a service."""

    number: int
    """From 0."""
    count: int
    folder: Path
    """Holds the Unix socket of each worker, at which the others reach it."""

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [number for number in range(self.count) if number != self.number]


def unix_socket(folder: Path, number: int) -> Path:
    """Where worker `number` listens for the other workers and the parent process."""
    return folder / f"{number}.sock"


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """A bound socket for each address of `host`. `shared`: other processes may bind the same address.

    Raises OSError if an address is taken. The kernel spreads new connections over the sockets that listen.
    """
    found = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            bound = socket.socket(family, kind, protocol)
            found.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
    except OSError:
        for bound in found:
            bound.close()
        raise
    return found


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, however it ends.

    The parent holds the other end of this process's standard input, which the kernel closes with the parent.
    """

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
