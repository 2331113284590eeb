"""Adds low-rank adapters to a model, disables them for the reference policy, and writes them for PEFT."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_service.model.export import ExportTensor, write_tensors
from trainer_service.model.settings import LoraSettings

ADAPTER = "default"
"""The name that PEFT gives to a single adapter."""


class Adapters:
    """The adapters of one model, injected into its layers. The model itself is called as before."""

    def __init__(self, model: Any, settings: LoraSettings, model_path: Path) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

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
        inject_adapter_in_model(self._config, model, ADAPTER)
        self._model = model
        self._layers: list[Any] = [each for each in model.modules() if isinstance(each, LoraLayer)]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the context, the model is the base model. Adapters are scaled by 0. PEFT's own way to
        disable them would also disable the gradients of parameters that the optimizer holds."""
        for layer in self._layers:
            layer.set_scale(ADAPTER, 0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(ADAPTER, 1)

    def write(self, directory: Path | None) -> None:
        """Write adapter_config.json and adapter_model.safetensors. Every rank must call it; only the rank
        that writes has a directory. Raises OSError."""
        tensors = [
            ExportTensor.of(f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", parameter)
            for name, parameter in self._model.named_parameters()
            if f".{ADAPTER}." in name
        ]
        dtypes = {tensor.name: tensor.sources[0].dtype for tensor in tensors}
        if directory is not None:
            self._config.save_pretrained(str(directory))
        write_tensors(directory / "adapter_model.safetensors" if directory else None, tensors, dtypes)
