"""Loads a model for ZeRO 3. Each weight is partitioned when it is read, so no rank ever holds the model.

file ─ mmap ─▶ one weight, converted ─▶ the part of this rank       the rest of the weight is dropped
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
