"""Directories of models as others made them: tensors that nobody trains, several sets of weights."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}
Change = Callable[[Path], object]


def copied(model: Path, directory: Path, *changes: Change) -> Path:
    """A copy of a model's directory, after the changes."""
    shutil.copytree(model, directory)
    for change in changes:
        change(directory)
    return directory


def adding(tensors: Mapping[str, Tensor]) -> Change:
    """Add tensors to the weights."""

    def change(directory: Path) -> None:
        save_file(load_file(directory / WEIGHTS) | dict(tensors), directory / WEIGHTS, METADATA)

    return change


def without(name: str) -> Change:
    def change(directory: Path) -> None:
        kept = load_file(directory / WEIGHTS)
        del kept[name]
        save_file(kept, directory / WEIGHTS, METADATA)

    return change


def with_file(name: str, content: bytes = b"x") -> Change:
    def change(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)

    return change


def with_weights(name: str, tensors: Mapping[str, Tensor] | None = None) -> Change:
    """Add a file of weights that belong to another layout, or to another tool."""
    found = dict(tensors or {"layers.0.attention.wq.weight": torch.ones(2, 2)})
    return lambda directory: save_file(found, directory / name)


def sharded(directory: Path, *, index: bool = True, keeps: bool = False) -> None:
    """Divide the weights into two files. With `keeps`, the single file stays, with other weights."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, directory / file, METADATA)
    if index:
        named = {name: file for file, half in zip(files, halves, strict=True) for name in half}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    if keeps:
        save_file({name: value + 1 for name, value in tensors.items()}, directory / WEIGHTS, METADATA)
    else:
        (directory / WEIGHTS).unlink()


def configured(**changes: object) -> Change:
    """Change keys of config.json; None removes one."""

    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(kept))

    return change
