"""Describes the run and the shards of a checkpoint, decides whether another trainer can load it, and converts
it for another number of ranks or ZeRO stage, by DeepSpeed's universal format.

{tag}/ ─ ds_to_universal ─▶ {tag}.universal/ ─ load on all ranks ─▶ removed
"""

import hashlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

logger = logging.getLogger(__name__)

PIECES, PIECE_BYTES = 64, 64 * 1024
"""So many pieces of each file of weights are read, at equal distances. A model of any size is read quickly,
and a training changes nearly every weight."""


@dataclass(frozen=True)
class BaseModel:
    """The model over which all others are trained."""

    path: str
    digest: str
    """SHA-256 of the configuration, and of pieces of the weights."""

    @classmethod
    def of(cls, directory: Path) -> "BaseModel":
        """Raises OSError."""
        digest = hashlib.sha256((directory / "config.json").read_bytes())
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for at in range(PIECES):
                    file.seek(at * size // PIECES)
                    digest.update(file.read(PIECE_BYTES))
        return cls(str(directory), digest.hexdigest())

    def is_named(self, path: str, digest: str) -> bool:
        """Whether a record names this one. Records of older builds have no digest."""
        return digest == self.digest if digest else path == self.path


NEW_RUN = (
    "go on as it began, or begin a new run with a checkpoint directory and a Redis of its own "
    "(`weir up --run-dir DIR`)"
)


class LoraLayout(msgspec.Struct, frozen=True):
    """The LoRA adapters of a checkpoint: the fields of `LoraSettings` that decide what is trained."""

    rank: int
    alpha: float
    target_modules: str | list[str]


class Layout(msgspec.Struct, frozen=True):
    """How a checkpoint is sharded. If the loading trainer has another number of ranks or ZeRO stage, the
    checkpoint is converted. All other fields must be equal."""

    ranks: int
    zero_stage: int
    dtype: str
    lora: LoraLayout | None = None
    """None without adapters."""
    critic: bool = False
    """Whether the checkpoint holds a critic."""
    source: str = ""
    """The `trainer.source` of its run. Older checkpoints name neither it nor their base model."""
    base_digest: str = ""
    """Which base model its run has."""

    def loads_into(self, own: "Layout") -> bool:
        """Whether the shards can be loaded without a conversion. Raises LayoutRefused if they cannot be
        converted either."""
        self.refuse_other_run(own)
        if msgspec.structs.replace(self, source=own.source, base_digest=own.base_digest) == own:
            return True
        if self.dtype != own.dtype:
            raise LayoutRefused(f"it was trained with trainer.dtype {self.dtype}, not {own.dtype}")
        if self.lora != own.lora:
            theirs, ours = _fields(self.lora), _fields(own.lora)
            raise LayoutRefused(f"it was trained with trainer.lora {theirs}, not {ours}")
        if self.critic != own.critic:
            raise LayoutRefused(f"it was trained with{'' if self.critic else 'out'} trainer.critic")
        if self.critic:
            raise LayoutRefused(
                f"its critic was saved by {self.ranks} ranks at trainer.zero_stage {self.zero_stage}, and a "
                "critic's shards are not converted"
            )
        if self.zero_stage == own.zero_stage == 0:
            return True  # every rank has all weights
        if 0 in (self.zero_stage, own.zero_stage):
            raise LayoutRefused(
                f"it was saved at trainer.zero_stage {self.zero_stage}, not {own.zero_stage}: "
                "DeepSpeed converts between stages 1, 2 and 3 only"
            )
        return False

    def refuse_other_run(self, own: "Layout") -> None:
        """Raises LayoutRefused if the checkpoint is of a run with another base model or another source."""
        if "" not in (self.base_digest, own.base_digest) and self.base_digest != own.base_digest:
            raise LayoutRefused(f"it was made from another model than trainer.model_path: {NEW_RUN}")
        if "" not in (self.source, own.source) and self.source != own.source:
            raise LayoutRefused(f"it was made with trainer.source {self.source}, not {own.source}: {NEW_RUN}")


class LayoutRefused(Exception):
    """The trainer's settings do not allow to load this checkpoint."""


def _fields(lora: LoraLayout | None) -> object:
    return lora and msgspec.to_builtins(lora)


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
