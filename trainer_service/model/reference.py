"""The base model before any training: the reference policy of KL terms."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from trainer_service.model.settings import ModelSettings
from trainer_service.model.sharding.zero import reference_config, uses_cuda


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

    def __enter__(self) -> Any:
        if self._model is None:
            self._model = self._loaded()
        return self._model if self._partitioned else self._model.to(self._device)

    def _loaded(self) -> Any:
        model = self._load(self._config).eval().requires_grad_(False)
        if not self._partitioned:
            return model
        # Without an optimizer, the engine only gathers the weights of each layer for its part of a pass.
        engine, *_ = self._deepspeed.initialize(model=model, config=self._config)
        engine.eval()
        return engine

    def __exit__(self, *_: object) -> None:
        if self._returns and not self._partitioned:
            self._model.to("cpu")
