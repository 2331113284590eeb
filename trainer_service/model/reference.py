"""The reference policy of KL terms: the base model before any training, or the policy at an earlier step.

base model ─ first use ─▶ Reference ◀─ follow ─ the policy's weights, every n steps
                              └─ copied, load ─▶ reference/model.safetensors, once it has followed
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open

from trainer_service.model.export import ExportTensor
from trainer_service.model.huggingface import WEIGHTS
from trainer_service.model.settings import ModelSettings
from trainer_service.model.sharding.universal import REFERENCE
from trainer_service.model.sharding.zero import assign, gathered, reference_config, uses_cuda
from trainer_service.model.snapshot import SnapshotMemory


class Reference:
    """A second copy of the base model, loaded at its first use.

    `with reference as model` gives the model on the device; with `reference_offload` or shared memory it
    returns to the CPU afterwards. At stage 3 of ZeRO the model is a DeepSpeed engine: each rank keeps a part
    of each weight, and every rank must make each pass.
    """

    def __init__(
        self,
        deepspeed: ModuleType,
        load: Callable[[Mapping[str, object]], Any],
        settings: ModelSettings,
        device: torch.device,
    ) -> None:
        """`load` loads the base model for an engine with this configuration."""
        self._deepspeed, self._load, self._device = deepspeed, load, device
        self._config = reference_config(settings, uses_cuda())
        self._partitioned = settings.sharding_stage == 3
        self._returns = settings.reference_offload or settings.memory == "shared"
        self._model: Any = None
        self._moved = False
        """Whether the weights are no longer those of the base model."""
        self._copied = SnapshotMemory()

    def __enter__(self) -> Any:
        model = self._loaded()
        return model if self._partitioned else model.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._returns and not self._partitioned:
            self._model.to("cpu")

    def follow(self, policy: Any) -> None:
        """Take over the weights of a model of the same shape. Every rank must call it."""
        own = self._parameters()
        for name, parameter in policy.named_parameters():
            with gathered([parameter]):
                assign(own[name], parameter.data)
        self._moved = True

    def copied(self, rank: int) -> dict[str, Callable[[Path], object]]:
        """Copy the weights into the memory of rank 0's host, if they are no longer those of the base model.
        Returns what writes them into which part of a checkpoint. Every rank must call it."""
        if not self._moved:
            return {}
        tensors = [ExportTensor.of(*named) for named in self._parameters().items()]
        dtypes = {tensor.name: tensor.sources[0].dtype for tensor in tensors}
        weights = self._copied.take(tensors, dtypes, rank=rank)
        return {REFERENCE: partial(weights.write, file_bytes=sys.maxsize)}

    def load(self, directory: Path) -> None:
        """Read back what was written of the copy, or become the base model if nothing was. Every rank must
        call it."""
        path = directory / REFERENCE / WEIGHTS
        if not path.exists():
            self._model = None if self._moved else self._model
            self._moved = False
            return
        with safe_open(path, "pt") as file:
            for name, parameter in self._parameters().items():
                assign(parameter, file.get_tensor(name))
        self._moved = True

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        model = self._loaded()
        return dict((model.module if self._partitioned else model).named_parameters())

    def _loaded(self) -> Any:
        if self._model is None:
            model = self._load(self._config).eval().requires_grad_(False)
            self._model = self._engine(model) if self._partitioned else model
        return self._model

    def _engine(self, model: Any) -> Any:
        """Without an optimizer, the engine only gathers the weights of each layer for its part of a pass."""
        engine, *_ = self._deepspeed.initialize(model=model, config=self._config)
        engine.eval()
        return engine
