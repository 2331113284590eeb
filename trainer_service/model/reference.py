"""The base model as it was before any training, which a KL term compares the policy with."""

from collections.abc import Callable
from typing import Any

import torch


class Reference:
    """A second copy of the base model on every rank, loaded when it is asked for the first time."""

    def __init__(self, load: Callable[[], Any], device: torch.device, offload: bool) -> None:
        self._load, self._device, self._offload = load, device, offload
        self._model: Any = None

    def __enter__(self) -> Any:
        """The model, on the device."""
        if self._model is None:
            self._model = self._load().eval().requires_grad_(False)
        return self._model.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._offload:
            self._model.to("cpu")
