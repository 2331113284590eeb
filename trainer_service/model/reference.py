"""The reference policy of KL terms: the base model before any training, or the policy at an earlier step.

base model ─ first use ─▶ Reference ◀─ follow ─ the policy's weights, every n steps
                              └─ save, load ─▶ reference.safetensors, once it has followed
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer_service.model.export import ExportTensor, write_tensors
from trainer_service.model.sharding.universal import REFERENCE
from trainer_service.model.sharding.zero import assign, gathered


class Reference:
    """A second copy of the base model on every rank, loaded at its first use.

    `with reference as model` gives the model on the device; with `offload` it returns to the CPU afterwards.
    """

    def __init__(self, load: Callable[[], Any], device: torch.device, offload: bool) -> None:
        self._load, self._device, self._offload = load, device, offload
        self._model: Any = None
        self._moved = False
        """Whether the weights are no longer those of the base model."""

    def __enter__(self) -> Any:
        return self._loaded().to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._offload:
            self._model.to("cpu")

    def follow(self, policy: Any) -> None:
        """Take over the weights of a model of the same shape. Every rank must call it."""
        own = dict(self._loaded().named_parameters())
        for name, parameter in policy.named_parameters():
            with gathered([parameter]):
                assign(own[name], parameter.data)
        self._moved = True

    def save(self, directory: Path, writes: bool) -> None:
        """Write the weights into `directory`, if they are no longer those of the base model. Every rank must
        call it; one `writes`. Raises OSError."""
        if self._moved:
            tensors = [ExportTensor.of(*named) for named in self._model.named_parameters()]
            dtypes = {tensor.name: tensor.sources[0].dtype for tensor in tensors}
            write_tensors(directory / REFERENCE if writes else None, tensors, dtypes)

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote, or become the base model if it wrote nothing. Every rank must call
        it."""
        if not (directory / REFERENCE).exists():
            self._model = None if self._moved else self._model
            self._moved = False
            return
        with safe_open(directory / REFERENCE, "pt") as file:
            for name, parameter in self._loaded().named_parameters():
                assign(parameter, file.get_tensor(name))
        self._moved = True

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = self._load().eval().requires_grad_(False)
        return self._model
