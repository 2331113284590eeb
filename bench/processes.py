"""Starts the processes of a benchmark, waits for them, and measures their CPU time."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: list[str], environment: dict[str, str] | None = None, ends_within_s: float = 20
) -> Iterator[int]:
    """A process that runs during the context; gives its id. It is told to end, and has so many seconds for
    that."""
    process = subprocess.Popen(command, env=os.environ | (environment or {}))
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(ends_within_s)


def module(*arguments: str | float | Path) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]


def answering(url: str, timeout_s: float = 30) -> None:
    """Wait until `url` answers with status 200. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(url)
        time.sleep(0.05)


def cpu_s(pid: int) -> float:
    """The CPU seconds that all threads of a process have used."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def with_children(pid: int) -> list[int]:
    """The process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in with_children(int(child)))]
