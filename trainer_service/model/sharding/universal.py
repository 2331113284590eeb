"""Converts a checkpoint of another number of ranks or ZeRO stage, by DeepSpeed's universal format.

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

SUFFIX = ".universal"
REFERENCE = "reference"
"""The directory of a moved reference policy in a checkpoint. It is the same for every layout."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a launcher makes a process one of several ranks."""


class NotConverted(Exception):
    """DeepSpeed's converter failed. The checkpoint is unchanged."""


@contextmanager
def converted(directory: Path, tag: str) -> Iterator[str]:
    """Inside the context, the converted checkpoint exists under the returned tag. The original does not
    change.

    Raises NotConverted.
    """
    universal_tag = f"{tag}{SUFFIX}"
    remove_converted(directory)
    try:
        logger.info(
            "converting checkpoint %s: it was saved by another number of ranks or at another stage", tag
        )
        _convert(directory / tag, directory / universal_tag)
        yield universal_tag
    finally:
        remove_converted(directory)


def remove_converted(directory: Path) -> None:
    """Remove converted checkpoints, also those whose conversion did not end."""
    for leftover in directory.glob(f"*{SUFFIX}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    arguments = ["--inject_missing_state", "--input_folder", str(source), "--output_folder", str(target)]
    run_converter([*arguments, "--num_extract_workers", "1", "--num_merge_workers", "1"], source.name)
    if (reference := source / REFERENCE).exists():
        shutil.copytree(reference, target / REFERENCE, copy_function=os.link)
    _link_for_every_stage(target)
    _complete_for_every_stage(target / "zero")


def run_converter(arguments: list[str], name: str) -> None:
    """Run DeepSpeed's converter as a process, so that its memory is free afterwards.

    Raises NotConverted.
    """
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotConverted(f"checkpoint {name} could not be converted: {last}")


def _link_for_every_stage(target: Path) -> None:
    """Stage 3 expects the file with the schedule under another name than the other stages do."""
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    (there,) = (name for name in names if (target / name).exists())
    for name in set(names) - {there}:
        os.link(target / there, target / name)


def _complete_for_every_stage(zero: Path) -> None:
    """Add data that the loading stage expects, and that the converter did not find at the saving stage.

    Stages 1 and 2 need DeepSpeed's version, and for each weight a dict with its steps. Stage 3 needs the
    number of steps once, for all weights."""
    path = zero / "optimizer_state.pt"
    state = _read(path)
    state.setdefault("ds_version", importlib.metadata.version("deepspeed"))
    if "optimizer_state_dict" in state:
        steps = state["optimizer_state_dict"]["state"][0]["step"]
        for weight in (each for each in zero.iterdir() if each.is_dir()):
            _wrap(weight, steps)
    else:
        steps = torch.as_tensor(_read(next(zero.glob("*/step.pt"))), dtype=torch.float32)
        state["optimizer_state_dict"] = {
            "state": {0: {"step": steps}},
            "param_groups": state["param_groups"],
        }
    torch.save(state, path)


def _wrap(weight: Path, steps: Any) -> None:
    for path in weight.glob("*.pt"):
        if not isinstance(tensor := _read(path), dict):
            torch.save({"param": tensor}, path)
    torch.save(steps, weight / "step.pt")


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # the trainer's own file
