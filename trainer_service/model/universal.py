"""A checkpoint of other ranks or another stage, cut anew: DeepSpeed's universal checkpoint, for one load.

{tag}/ ─ ds_to_universal ─▶ {tag}.universal/ ─ load on all ranks ─▶ removed
"""

import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

ASIDE = ".universal"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a process takes itself for one of several ranks."""


class NotConverted(Exception):
    """DeepSpeed's converter failed. The checkpoint is as it was."""


@contextmanager
def converted(directory: Path, tag: str) -> Iterator[str]:
    """The tag of the same checkpoint for any number of ranks, within. It is read, and never written to."""
    aside = f"{tag}{ASIDE}"
    sweep(directory)
    try:
        logger.info("checkpoint %s is converted, since it was saved by other ranks or at another stage", tag)
        _convert(directory / tag, directory / aside)
        yield aside
    finally:
        sweep(directory)


def sweep(directory: Path) -> None:
    """Remove what a conversion left, finished or not."""
    for leftover in directory.glob(f"*{ASIDE}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise NotConverted(f"checkpoint {source.name} could not be converted: {last}")
    _name_for_every_stage(target)
    _tell_every_stage(target / "zero")


def _name_for_every_stage(target: Path) -> None:
    """Stage 3 looks for the schedule by another name than the others do."""
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (there,) = (name for name in names if (target / name).exists())
    for name in set(names) - {there}:
        os.link(target / there, target / name)


def _tell_every_stage(zero: Path) -> None:
    """The converter keeps the words of the stage that saved. The stages below 3 want to hear a release, and
    of each weight its name for it and its steps; stage 3 wants the steps of all."""
    path = zero / "optimizer_state.pt"
    state = _read(path)
    state.setdefault("ds_version", importlib.metadata.version("deepspeed"))
    if "optimizer_state_dict" in state:
        steps = state["optimizer_state_dict"]["state"][0]["step"]
        for weight in (each for each in zero.iterdir() if each.is_dir()):
            _wrap(weight, steps)
    else:
        steps = torch.as_tensor(_read(next(zero.glob("*/step.pt"))), dtype=torch.float32)
        given = {"state": {0: {"step": steps}}, "param_groups": state["param_groups"]}
        state["optimizer_state_dict"] = given
    torch.save(state, path)


def _wrap(weight: Path, steps: Any) -> None:
    for path in weight.glob("*.pt"):
        if not isinstance(tensor := _read(path), dict):
            torch.save({"param": tensor}, path)
    torch.save(steps, weight / "step.pt")


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # the trainer's own file
