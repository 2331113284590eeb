"""Checks that run before any service starts; each failure is one sentence that says what to change."""

import math
import os
import shutil
import socket
from collections.abc import Iterable

import psutil

from rollout_queue.config_file import MalformedSettings
from rollout_queue.machine_memory import machine_memory
from rollout_queue.model_files import BrokenWeights, ModelFiles
from rollout_queue.settings import read_settings
from rollout_server.engine.command import cpu_kv_tokens, engine_dtype, find_device, kv_bytes_of_token
from rollout_server.settings import RolloutServerSettings
from weir import installing
from weir.errors import StackError
from weir.stack.service_process import Service
from weir.stack.services import determined_sections, effective_sections
from weir.stack.settings import StackSettings, variable

TRAINED_BYTES, ADAPTED_BYTES = 43, 12
"""What the trainer takes on CPU for each parameter, measured, all in float32: weights, gradients, AdamW's
state, and copies for a checkpoint and a push. With LoRA, the weights and a merged copy."""
SERVICES_BYTES = 2_500_000_000
"""What all services take, measured with a tiny model."""


def check_machine(settings: StackSettings) -> None:
    """Raises StackError when the model, the engine's Python, disk space or memory is missing."""
    if settings.model_path is None:
        raise StackError(
            "no model is set: set WEIR_MODEL_PATH to a Hugging Face directory (`weir demo` makes a tiny one)"
        )
    if not (settings.model_path / "config.json").is_file():
        raise StackError(f"{settings.model_path} is not a Hugging Face directory: it has no config.json")
    check_place(settings)
    check_memory(settings)


def check_place(settings: StackSettings) -> None:
    """Raises StackError when the engine's Python or disk space is missing."""
    if not settings.engine_python.is_file():
        raise StackError(
            f"the engine's Python {settings.engine_python} is missing: run `{installing.COMMAND}`, "
            "or set rollout_server.engine_python (WEIR_ROLLOUT_SERVER__ENGINE_PYTHON)"
        )
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(settings.run_dir).free
    if free_bytes < settings.free_disk_bytes:
        raise StackError(
            f"the disk of {settings.run_dir} has {free_bytes / 2**30:.1f} GiB left, and a run needs "
            f"{settings.free_disk_bytes / 2**30:.1f}: free some space, or set stack.free_disk_bytes"
        )


def check_memory(settings: StackSettings) -> None:
    """Raises StackError when training and engine would not fit into the free memory of a machine without GPU,
    where the system would kill a process later, without a word."""
    free = machine_memory().free
    if settings.free_memory_bytes is not None:
        needed, advice = settings.free_memory_bytes, "stack.free_memory_bytes asks for that"
    else:
        needed, advice = _estimated(settings, free)
    if needed > free:
        raise StackError(
            f"this machine has {free / 1e9:.1f} GB of free memory, and {settings.model_path} needs about "
            f"{needed / 1e9:.1f} GB: {advice}"
        )


def _estimated(settings: StackSettings, free: int) -> tuple[int, str]:
    """The bytes that all services need on CPU, 0 with a GPU, and what would make them fewer."""
    path, server = settings.model_path, _rollout_server(settings)
    assert path is not None  # noqa: S101 - `check_machine` looked
    if find_device(server.engine_device) == "cuda":
        return 0, ""  # the engine and the trainer look at the memory of the GPU
    try:
        parameters = sum(math.prod(each.shape) for _, each in ModelFiles.read(path).tensors.values())
        cache = cpu_kv_tokens(server, path, free) * kv_bytes_of_token(server, path)
    except (BrokenWeights, OSError) as error:
        raise StackError(f"{path} is not a model that can be served: {error}") from error
    weights = parameters * (4 if engine_dtype(server, "cpu") == "float32" else 2)
    others = SERVICES_BYTES + weights + cache
    adapted = others + parameters * ADAPTED_BYTES
    anyway = "take a smaller model, or set stack.free_memory_bytes to 0 to try it"
    if server.max_total_tokens is not None:
        anyway = f"lower rollout_server.max_total_tokens, whose cache is {cache / 1e9:.1f} GB of it, {anyway}"
    if _trains_adapters(settings):
        return adapted, anyway
    whole = others + parameters * TRAINED_BYTES
    return whole, f"set trainer.lora to {{}} to train adapters, with about {adapted / 1e9:.1f} GB, {anyway}"


def _rollout_server(settings: StackSettings) -> RolloutServerSettings:
    try:
        return read_settings(RolloutServerSettings, **determined_sections(settings)["rollout_server"])
    except MalformedSettings as error:
        raise StackError(str(error)) from error


def _trains_adapters(settings: StackSettings) -> bool:
    """Read without the trainer's own settings, whose import takes seconds."""
    named = variable("trainer", "lora")
    return effective_sections(settings)["trainer"].get("lora") is not None or any(
        name == named or name.startswith(f"{named}__") for name in os.environ
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
