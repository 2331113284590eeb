"""The base model before any training: the reference policy of KL terms."""

from collections.abc import Callable
from typing import Any

import torch


class Reference:
    """A second copy of the base model on every rank, loaded at its first use.

    `with reference as model` gives the model on the device; with `offload` it returns to the CPU afterwards.
    """

    def __init__(self, load: Callable[[], Any], device: torch.device, offload: bool) -> None:
        self._load, self._device, self._offload = load, device, offload
        self._model: Any = None

    def __enter__(self) -> Any:
        if self._model is None:
            self._model = self._load().eval().requires_grad_(False)
        return self._model.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._offload:
            self._model.to("cpu")
