"""Checks the GPU, its driver and the installed packages."""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers.utils import is_flash_attn_2_available

from bench.gpu.checks import Check, at_least

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = Path(sys.prefix).with_name(".venv-engine") / "bin" / "python"
FREE_SHARE = 0.95


def environment(device: torch.device) -> Iterator[Check]:
    if device.type == "cuda":
        yield from _gpu(device)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for pin in project["optional-dependencies"]["trainer"]:
        name, _, wanted = pin.partition("==")
        if name in ("torch", "transformers", "deepspeed"):
            yield _pinned(name, wanted)
    found = ENGINE_PYTHON.is_file()
    yield Check("the engine's environment", "found" if found else "missing", str(ENGINE_PYTHON), found)


def _gpu(device: torch.device) -> Iterator[Check]:
    facts = torch.cuda.get_device_properties(device)
    size = f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, {torch.cuda.device_count()} of them"
    yield Check("the GPU", size, "any", True)
    capability = f"{facts.major}.{facts.minor}"
    yield Check("compute capability", capability, "8.0 or more, for bfloat16", facts.major >= 8)
    free, total = torch.cuda.mem_get_info(device)
    yield at_least("memory that no other process has", free / total, FREE_SHARE)
    nccl = torch.distributed.is_nccl_available()
    yield Check("NCCL", "found" if nccl else "missing", "found", nccl)
    flash = is_flash_attn_2_available()
    name = "flash-attn" if flash else "torch's attention, because flash-attn is not installed"
    yield Check("attention", name, "either; flash-attn is faster for short rows", True)


def _pinned(name: str, wanted: str) -> Check:
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "missing"
    return Check(name, found, wanted, found.partition("+")[0] == wanted)
