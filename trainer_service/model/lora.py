"""Low-rank adapters in a model: put in, switched off for a reference, and written as PEFT has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_service.model.export import Piece, write_pieces
from trainer_service.settings import LoraSettings

ADAPTER = "default"
"""PEFT's own name for the only one."""


class Adapters:
    """The adapters of one model. They are put into it, without a wrapper: it is called as before."""

    def __init__(self, model: Any, settings: LoraSettings, model_path: Path) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        alpha: Any = settings.alpha  # PEFT divides it by the rank: any number will do
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
    def switched_off(self) -> Iterator[None]:
        """Within, the model is the base model. Scaled to nothing and not disabled: PEFT would also switch off
        their gradients, under the optimizer that holds them."""
        for layer in self._layers:
            layer.set_scale(ADAPTER, 0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(ADAPTER, 1)

    def write(self, directory: Path | None) -> None:
        """adapter_config.json and adapter_model.safetensors. Every rank has to call it, one of them with a
        directory."""
        pieces = [
            Piece.of(f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", parameter)
            for name, parameter in self._model.named_parameters()
            if f".{ADAPTER}." in name
        ]
        dtypes = {piece.name: piece.sources[0].dtype for piece in pieces}
        if directory is not None:
            self._config.save_pretrained(str(directory))
        write_pieces(directory / "adapter_model.safetensors" if directory else None, pieces, dtypes)
