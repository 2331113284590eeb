"""Two hosts on this machine: namespaces for network, host name, mounts and processes.

weir1 10.77.0.1 ─ veth ─ 10.77.0.2 weir2     each with its own loopback; nothing else is reachable from them
"""

import ctypes
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMES = ("weir1", "weir2")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
KINDS = ("--net", "--mount", "--uts", "--pid")
MADE = ("unshare", *KINDS, "--fork", "--kill-child", "--mount-proc")
DEVICE = "veth0"
FIRST = "hostname $0 && mount --bind $1 /etc/hosts && ip link set lo up && echo ready && exec cat"
"""The first process of a host. It ends when the test process does, and then the kernel kills all others."""


def why_not() -> str | None:
    """Why this machine can have no such hosts; None if it can."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool)]:
        return f"needs {', '.join(missing)}"
    link = ("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", "veth1")
    tried = subprocess.run([*MADE, *link], capture_output=True, text=True, check=False)
    return f"network namespaces are not permitted: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    name: str
    address: str
    pid: int
    """Its first process."""

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host."""
        return ["nsenter", "--target", str(self.pid), *KINDS, *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.enter(*command), check=True)

    def cut(self) -> None:
        """From now on, no packet leaves or reaches the host. No connection breaks."""
        self.run("ip", "link", "set", DEVICE, "down")

    def restore(self) -> None:
        """Undo `cut`."""
        self.run("ip", "link", "set", DEVICE, "up")

    def ranks(self) -> list[psutil.Process]:
        """The processes `python -m trainer_service` on this host."""
        return [process for process in psutil.process_iter() if self._has_rank(process)]

    def _has_rank(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError, ValueError, IndexError):
            words = process.cmdline()
            module = words[words.index("-m") + 1]
            here = self._network.readlink() == Path(f"/proc/{process.pid}/ns/net").readlink()
            return here and "python" in Path(words[0]).name and module == "trainer_service"
        return False

    @property
    def _network(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net")

    def listen(self, port: int) -> socket.socket:
        """A socket on this host's loopback, for a server in the test's own process."""

        def within() -> socket.socket:
            with self._network.open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.create_server(("127.0.0.1", port))

        with ThreadPoolExecutor(1) as thread:  # only this thread enters the host
            return thread.submit(within).result()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Inside the context the hosts exist. At its end, everything that runs on them is killed."""
    lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
    names = folder / "hosts"
    names.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with _host(0, names) as first, _host(1, names) as second:
        link = ["ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second.pid)]
        subprocess.run(["nsenter", "--target", str(first.pid), "--net", *link], check=True)
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            host.run("ip", "link", "set", DEVICE, "up")
        yield first, second


@contextmanager
def _host(index: int, names: Path) -> Iterator[Host]:
    """A host without a link to the other one."""
    command = [*MADE, "sh", "-c", FIRST, NAMES[index], str(names)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            (first,) = psutil.Process(process.pid).children()
            yield Host(NAMES[index], ADDRESSES[index], first.pid)
        finally:
            process.kill()
