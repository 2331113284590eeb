"""Checks that run before any service starts; each failure is one sentence that says what to change."""

import shutil
import socket
from collections.abc import Iterable

import psutil

from weir.errors import StackError
from weir.stack.process import Service
from weir.stack.settings import StackSettings


def check_machine(settings: StackSettings) -> None:
    """Raises StackError when the model, the engine's Python or disk space is missing."""
    if settings.model_path is None:
        raise StackError(
            "no model is set: set WEIR_MODEL_PATH to a Hugging Face directory (`weir demo` makes a tiny one)"
        )
    if not (settings.model_path / "config.json").is_file():
        raise StackError(f"{settings.model_path} is not a Hugging Face directory: it has no config.json")
    if not settings.engine_python.is_file():
        raise StackError(
            f"the engine's Python {settings.engine_python} is missing: run `make install`, "
            "or set rollout_server.engine_python (WEIR_ROLLOUT_SERVER__ENGINE_PYTHON)"
        )
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(settings.run_dir).free
    if free_bytes < settings.free_disk_bytes:
        raise StackError(
            f"the disk of {settings.run_dir} has {free_bytes / 2**30:.1f} GiB left, and a run needs "
            f"{settings.free_disk_bytes / 2**30:.1f}: free some space, or set stack.free_disk_bytes"
        )


def check_ports(services: Iterable[Service]) -> None:
    """Raises StackError for the first port that is in use, or that two services would share."""
    seen: dict[int, str] = {}
    for service in services:
        for port, setting in service.ports.items():
            if port in seen:
                raise StackError(f"two services would use port {port}: change {seen[port]} or {setting}")
            seen[port] = setting
            if not port_is_free(port):
                raise StackError(
                    f"port {port}, which {service.name} needs, is in use{_by_whom(port)}: "
                    f"stop that process, or change {setting}"
                )


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Servers set this option, too. With it, a port counts as free while connections of an earlier run are
        # in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _by_whom(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass  # the system may hide processes of other users; the message names the port anyway
    return ""
