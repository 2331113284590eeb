"""Adds low-rank adapters to a model, disables them for the reference policy, and writes them for PEFT."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_queue.contract.published_policy import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FileSpec
from trainer_service.model.exported_tensors import ExportTensor
from trainer_service.model.host_copies import HostTensor, SnapshotMemory, write_file
from trainer_service.model.logprob_head import LogprobHead
from trainer_service.model.settings import LoraSettings

ADAPTER = "default"
"""The name that PEFT gives to a single set of adapters."""


@dataclass(frozen=True)
class AdapterSnapshot:
    """The adapters after one step. `write` may be called in another thread."""

    config: bytes
    """The text of adapter_config.json."""
    tensors: Sequence[HostTensor]

    def write(self, directory: Path) -> list[FileSpec]:
        """Write both files into `directory`. Returns what a manifest says of them. Raises OSError."""
        (directory / ADAPTER_CONFIG).write_bytes(self.config)
        digest = hashlib.sha256(self.config).hexdigest()
        config = FileSpec(ADAPTER_CONFIG, len(self.config), digest)
        return [config, write_file(directory / ADAPTER_WEIGHTS, self.tensors)]


class Adapters:
    """One adapter for each of some layers of a model, injected into them. The model itself is called as
    before. A model may have several such sets, each under its own name, of which one is active."""

    def __init__(self, model: Any, settings: LoraSettings, model_path: Path, name: str = ADAPTER) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        from trainer_service.model.adapted_head import AdaptedHead

        alpha: Any = (
            settings.alpha
        )  # PEFT annotates an int, but any number works: it divides alpha by the rank
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,
            target_modules=settings.target_modules,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(model_path),
        )
        self._config._register_custom_module({LogprobHead: AdaptedHead})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match")  # no experts
            warnings.filterwarnings("ignore", "Unsupported layer type")  # it has all that PEFT looks for
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # see `export_tensors`
            inject_adapter_in_model(self._config, model, name)
        self._model, self._name = model, name

    @property
    def _layers(self) -> list[Any]:
        """All layers of the model that have adapters now, also those of other sets only."""
        from peft.tuners.lora import LoraLayer

        return [each for each in self._model.modules() if isinstance(each, LoraLayer)]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The weights of this set, by the names that PEFT gives them in a file."""
        return {
            f"base_model.model.{name.replace(f'.{self._name}.', '.')}": parameter
            for name, parameter in self._model.named_parameters()
            if f".{self._name}." in name
        }

    def activate(self) -> None:
        """Make this set the active one: passes use it, and no other has gradients."""
        for layer in self._layers:
            layer.set_adapter([self._name])

    def remove(self) -> None:
        """Take this set out of the model's layers."""
        for layer in self._layers:
            layer.set_adapter([])
            layer.delete_adapter(self._name)
        self._model.peft_config.pop(self._name, None)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the context, the model is the base model. Adapters are scaled by 0. PEFT's own way to
        disable them would also disable the gradients of parameters that the optimizer holds."""
        for layer in self._layers:
            layer.set_scale(self._name, 0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(self._name, 1)

    def snapshot(self, memory: SnapshotMemory, rank: int) -> AdapterSnapshot:
        """Copy the adapters into the memory of rank 0's host. Every rank must call it."""
        return AdapterSnapshot(self._config_text(), memory.take(*self._exported(), rank=rank).tensors)

    def _exported(self) -> tuple[list[ExportTensor], dict[str, torch.dtype]]:
        """The tensors under PEFT's names, and their dtypes."""
        tensors = [ExportTensor.of(name, parameter) for name, parameter in self.parameters().items()]
        return tensors, {tensor.name: tensor.sources[0].dtype for tensor in tensors}

    def _config_text(self) -> bytes:
        """adapter_config.json as PEFT writes it."""
        config: dict[str, Any] = self._config.to_dict()  # type: ignore[no-untyped-call]
        config["inference_mode"] = True
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # PEFT keeps names in sets
        return f"{text}\n".encode()
