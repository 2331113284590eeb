"""The base model's files, compared with the model that is trained, and what of them nobody trains.

config.json ─▶ the model, without weights ─▶ names, shapes ─┐
headers of the files ─▶ names, shapes, types ───────────────┴─▶ rows of a table, or the start is refused
files ─ mapped ─▶ tensors that nobody trains ─▶ each version, byte by byte
"""

import logging
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_queue.model_checks import (
    KEY,
    TOKENIZER,
    files_check,
    output_head,
    quantized,
    refuse_quantized,
    tensors_check,
    tokenizer_check,
)
from rollout_queue.model_files import BrokenWeights, Located, ModelFiles, named, small_files
from rollout_queue.protocol.message import ModelCheck
from trainer_service.model.checkpoint_layout import BaseModel
from trainer_service.model.exported_tensors import ExportTensor, export_tensors, tied_names
from trainer_service.model.huggingface import (
    REFUSALS,
    SAFETENSORS_DTYPES,
    STORED_DTYPES,
    base_on_meta,
    first_words,
)

logger = logging.getLogger(__name__)


def transformers_check(model_path: Path) -> ModelCheck:
    """The ids that `AutoTokenizer` makes. The trainer needs no tokenizer for anything else."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]

        def encode(text: str, framed: bool) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=framed, verbose=False)
            return ids

        return tokenizer_check(encode, added)
    except Exception as error:  # whatever the tokenizer's code raises
        first = (str(error).splitlines() or [""])[0]
        detail = (
            f"transformers cannot load it, so nothing compares the gateway's: {type(error).__name__}: {first}"
        )
        return ModelCheck(check=TOKENIZER, outcome="unknown", detail=detail)


class BaseWeights:
    """The tensors of the base model's files."""

    def __init__(self, files: ModelFiles, checks: Sequence[ModelCheck] = ()) -> None:
        self._files = files
        self._mapped: dict[str, ExportTensor] = {}
        self.checks = tuple(checks)
        self.dtypes = {
            name: getattr(torch, STORED_DTYPES[tensor.dtype]) for name, (_, tensor) in files.tensors.items()
        }

    @classmethod
    def checked(cls, path: Path) -> "BaseWeights":
        """Read the headers of the files in a directory, and compare them with the model that its config.json
        describes. Raises SystemExit if the model could not be trained, served or published; the sentence
        names the file or the tensor."""
        try:
            files = ModelFiles.read(path)
            refuse_quantized(files)
            model = _on_meta(path)
            head = output_head(files, lambda: None if model is None else getattr(model.config, KEY, False))
            base = cls(files, [files_check(files), tensors_check(files), head.check])
            base.checks += (_compared(files, model, base), _others_check(files), transformers_check(path))
        except (BrokenWeights, OSError) as error:
            raise SystemExit(f"trainer.model_path: {path} cannot be trained: {error}") from error
        for check in base.checks:
            logger.info("%s", check.line)
        return base

    @cached_property
    def digest(self) -> str:
        """By which checkpoints of other base models are told apart."""
        return BaseModel.of(self._files.directory).digest

    def published(self, model: Any, merge_seed: int | None = None) -> list[ExportTensor]:
        """What a version has: the trained weights of `model`, and everything else as the base's files have
        it. A head that is tied comes with the embedding."""
        trained = list(export_tensors(model, merge_seed))
        present = {tensor.name for tensor in trained} | tied_names(model)
        return [*trained, *(self._carried(name) for name in self._files.tensors if name not in present)]

    def _carried(self, name: str) -> ExportTensor:
        if name not in self._mapped:
            self._mapped[name] = ExportTensor.in_file(name, mapped(self._files.tensors[name]))
        return self._mapped[name]


def mapped(place: Located) -> Tensor:
    """A tensor of a file. Its pages are read when they are used, and take no memory of this process."""
    path, stored = place
    dtype = getattr(torch, STORED_DTYPES[stored.dtype])
    if stored.end == stored.start:
        return torch.empty(stored.shape, dtype=dtype)
    raw = np.memmap(path, np.uint8, "r", stored.start, (stored.end - stored.start,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes
        return torch.from_numpy(raw).view(dtype).reshape(stored.shape)


def _on_meta(path: Path) -> Any | None:
    """None if transformers cannot make the model without its weights: it is compared when it is loaded."""
    try:
        return base_on_meta(path)
    except (RuntimeError, *REFUSALS) as error:
        logger.warning(
            "the model cannot be compared with its files before it is loaded: %s", first_words(error)
        )
        return None


def _compared(files: ModelFiles, model: Any | None, base: BaseWeights) -> ModelCheck:
    """The row about names and shapes. Raises BrokenWeights for a weight that the files have not, or with
    another shape."""
    row = "trained weights"
    if model is None:
        return ModelCheck(check=row, outcome="unknown", detail="they are compared when the model is loaded")
    trained = {tensor.name: tensor.shape for tensor in export_tensors(model)}
    for name, shape in trained.items():
        if name not in files.tensors:
            raise BrokenWeights(f"no tensor {name}, and the model that config.json describes has it")
        path, stored = files.tensors[name]
        if stored.shape != shape:
            reason = f"has shape {list(stored.shape)}, the model that config.json describes {list(shape)}"
            raise BrokenWeights(reason, file=path.name, tensor=name)
        if stored.dtype not in SAFETENSORS_DTYPES:
            raise BrokenWeights(quantized(stored), file=path.name, tensor=name)
    carried = [tensor.name for tensor in base.published(model) if tensor.name not in trained]
    if not carried:
        return ModelCheck(check=row, outcome="right", detail=f"all {len(trained)}")
    detail = f"{len(trained)}; each version has, unchanged, {named(carried)}"
    return ModelCheck(check=row, outcome="differs", detail=detail)


def _others_check(files: ModelFiles) -> ModelCheck:
    """The row about the files beside the weights."""
    kept, left_out = small_files(files.directory)
    others = [path.name for path in left_out]
    detail = f"{named([path.name for path in kept])} are in each version"
    return ModelCheck(
        check="other files",
        outcome="differs" if others else "right",
        detail=f"{detail}; left out: {named(others)}" if others else detail,
    )
