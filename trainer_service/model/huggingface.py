"""Loads a model from its Hugging Face directory, whole or partitioned, and copies the small files beside its
weights.

With ZeRO 3, each weight is partitioned when it is read, so no rank ever holds the model:
file ─ mmap ─▶ one weight, converted ─▶ the part of this rank       the rest of the weight is dropped
"""

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rollout_queue.model_files import WEIGHTS as WEIGHTS
from rollout_queue.model_files import ModelFiles, small_files, templates
from rollout_queue.protocol.message import ModelCheck
from trainer_service.model.images import reads_images
from trainer_service.model.logprob_head import LogprobHead, set_head
from trainer_service.model.packed_attention import Packing, set_attention, use_own_attention
from trainer_service.model.routers import recompute_contexts
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import uses_cuda

logger = logging.getLogger(__name__)

NO_READING_AHEAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""With this variable, transformers reads a weight when it sets it. Otherwise its threads read all of them."""


def load_partitioned(path: Path, dtype: torch.dtype, zero_config: Mapping[str, object]) -> Any:
    """Load the model of a Hugging Face directory, with a part of each weight on this rank. The parts are the
    same as those of a model that is loaded whole. No rank waits for another."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    partitioner = deepspeed.zero.Init(config_dict_or_path=dict(zero_config), dtype=dtype)
    with _partitioning_each_weight(partitioner, dtype):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    for parameter in model.parameters():
        _partition(partitioner, parameter, dtype)
    for buffer in model.buffers():  # DeepSpeed moves neither weights nor buffers of a partitioned model
        buffer.data = buffer.data.to(partitioner.local_device)
    return model


@contextmanager
def _partitioning_each_weight(partitioner: Any, dtype: torch.dtype) -> Iterator[None]:
    """Inside the context, `from_pretrained` partitions a weight when it has set it. This is the only place
    where a weight exists alone and under its final name: experts are fused before, and ties are made later.

    `set_param_for_module` is a private name of the pinned release of transformers. If nothing calls it,
    weights are partitioned at the end only, and test_partitioned.py finds too much memory."""
    from transformers import core_model_loading as loading

    set_whole = loading.set_param_for_module

    def set_partitioned(model: Any, name: str, *others: Any) -> None:
        set_whole(model, name, *others)
        owner, _, leaf = name.rpartition(".")
        parameter = model.get_submodule(owner)._parameters.get(leaf)
        if parameter is not None and owner not in _tied_modules(model):
            _partition(partitioner, parameter, dtype)

    former = os.environ.get(NO_READING_AHEAD)
    os.environ[NO_READING_AHEAD] = "1"
    loading.set_param_for_module = set_partitioned
    try:
        yield
    finally:
        loading.set_param_for_module = set_whole
        os.environ.pop(NO_READING_AHEAD)
        if former is not None:
            os.environ[NO_READING_AHEAD] = former


def _tied_modules(model: Any) -> set[str]:
    """The modules whose weights `from_pretrained` compares and ties at its end. They must be whole until
    then."""
    return {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}


def _partition(partitioner: Any, parameter: Tensor, dtype: torch.dtype) -> None:
    """Replace the value of a weight by this rank's part of it, unless that is done."""
    if hasattr(parameter, "ds_id"):
        return
    parameter.data = parameter.data.to(partitioner.local_device, dtype)
    # A private name of the pinned release. DeepSpeed's public way also broadcasts each weight from rank 0.
    partitioner._convert_to_deepspeed_param(parameter)
    parameter.partition()  # type: ignore[attr-defined]  # DeepSpeed has added it


class ModelUnfit(SystemExit):
    """The base model cannot be trained. The message is for the operator."""

    def __init__(self, check: ModelCheck) -> None:
        super().__init__(f"trainer.model_path: {check.detail}")
        self.check = check


@dataclass(frozen=True)
class CheckedModel:
    """How the base model and its copies are computed."""

    packing: Packing
    columns: int | None
    """The number of logits that the model keeps of its head's; None: all."""
    needs_all_logits: bool
    """Whether log-probabilities are computed from the model's own logits, all at once."""
    checks: tuple[ModelCheck, ...]

    def apply(self, model: Any) -> None:
        """Let a copy of the base model be computed like the one that was checked."""
        if self.packing is Packing.ONE_ROW:
            use_own_attention(model)
        head = model.get_output_embeddings()
        if isinstance(head, LogprobHead):
            head.returns_logits = self.needs_all_logits
            head.cut(self.columns)


def first_words(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


CHECKPOINTING = {"use_reentrant": False, "context_fn": recompute_contexts}
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The types that trained weights may have."""
STORED_DTYPES = SAFETENSORS_DTYPES | {
    **{
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    "BOOL": "bool",
}
"""Also those of tensors that nobody trains."""


REFUSALS = (
    *(ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError, OSError),
    NotImplementedError,
)
"""What transformers raises for a directory that it cannot load. Other RuntimeErrors may be of the memory."""


def load_base(settings: ModelSettings, engine_config: Mapping[str, object] | None = None) -> Any:
    """Load the base model for a DeepSpeed engine with this configuration. At stage 3 of ZeRO, this rank gets
    a part of each weight."""
    partitioned = engine_config if settings.sharding_stage == 3 else None
    flash = uses_cuda() and settings.sequence_parallel == 1
    return load_model(settings.model_path, getattr(torch, settings.precision), flash, partitioned)


def load_model(
    path: Path, dtype: torch.dtype, flash: bool = False, zero_config: Mapping[str, object] | None = None
) -> Any:
    """Load the base model. Its attention keeps packed rows apart, and its head computes log-probabilities of
    sampled tokens. It has no dropout, which would make them differ from the engine's. With a
    configuration of ZeRO 3, this rank gets a part of each weight."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # cuDNN would round the factors of convolutions in float32 to the 10 bits of TF32. Products have all bits.
    torch.backends.cudnn.allow_tf32 = False
    sees = reads_images(path)
    with readable(path) as directory, refused_in_words(path):
        if zero_config is None:
            model = _kind_of(path).from_pretrained(directory, dtype=dtype, trust_remote_code=False)
        else:
            model = load_partitioned(directory, dtype, zero_config)
    set_attention(model, flash=flash and dtype is torch.bfloat16 and not sees)
    set_head(model)
    _disable_dropout(model)
    return model


def base_on_meta(path: Path) -> Any:
    """The base model without its weights: what it would load, with which shapes. Takes a moment, also for a
    large model."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what does not fit is said in our own words
    try:
        with readable(path) as directory:
            how = {"device_map": "meta", "ignore_mismatched_sizes": True, "trust_remote_code": False}
            return _kind_of(path).from_pretrained(directory, **how)
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def refused_in_words(path: Path) -> Iterator[None]:
    """Inside the context, SystemExit is raised in place of what transformers raises for a model that it does
    not know, or whose code is in its directory."""
    try:
        yield
    except REFUSALS as error:
        raise SystemExit(f"trainer.model_path: {path} cannot be loaded: {first_words(error)}") from error


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Inside the context: a directory of which transformers loads what engines load."""
    files = ModelFiles.read(path)
    if not files.ambiguous:
        yield path
        return
    with TemporaryDirectory(prefix="weir-model-") as directory:
        yield files.linked(Path(directory))


def copy_small_files(source: Path, target: Path, *, flat: bool = False) -> None:
    """Copy the files that a server needs besides the weights: configuration, tokenizer and chat templates;
    with `flat`, without those that are in a directory of their own."""
    kept, left_out = small_files(source)
    further = [] if flat else templates(source)
    for path in [*kept, *further]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    _log_left_out(source, tuple(path.name for path in left_out))


@cache
def _log_left_out(source: Path, names: tuple[str, ...]) -> None:
    """Once for a process: each version would say the same."""
    if names:
        logger.info("of %s, these files are in no version: %s", source, ", ".join(names))


def _kind_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_images(path) else AutoModelForCausalLM


def enable_activation_checkpointing(model: Any) -> None:
    """Recompute each layer's activations in the backward pass instead of keeping them."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=CHECKPOINTING)


def _disable_dropout(model: Any) -> None:
    """Set all dropout rates of the model to 0.

    eval() would also disable dropout, but transformers uses activation checkpointing only in train() mode.
    """
    for module in [*model.modules(), getattr(model, "config", None)]:
        for name, value in vars(module).items() if module is not None else ():
            if _is_rate(type(module).__name__, name) and isinstance(value, float):
                setattr(module, name, 0.0)


def _is_rate(kind: str, name: str) -> bool:
    """Whether an attribute is a dropout rate. Torch's layers call it `p`; models have names like
    attention_dropout, resid_pdrop and layerdrop."""
    return name == "p" if "Dropout" in kind else "drop" in name
