"""Exports of models for other programs, which the gateway offers for download.

{policies_dir}/external/{model}/{name}/{position}/
    an adapter   adapter_config.json, adapter_model.safetensors: PEFT's layout
    all weights  config.json, the tokenizer, model.safetensors or several with an index: Hugging Face's layout
"""

import json
from dataclasses import replace
from pathlib import Path

from rollout_queue.commands.command import LoggedCommand, SaveExternal
from rollout_queue.commands.result import Exported
from trainer_service.commands.named_files import NamedFiles
from trainer_service.commands.ranks import ModelRanks
from trainer_service.model.huggingface import copy_small_files
from trainer_service.model.lora import AdapterSnapshot
from trainer_service.model.trained.trained_model import PublishedWeights
from trainer_service.settings import TrainerSettings
from trainer_service.storage.disk_retry import DiskRetry

EXTERNAL = "external"
"""The directory of exports, in that of the published versions."""


class Exports(NamedFiles):
    """Writes exports. An export is never overwritten: its name is free again when it was deleted."""

    def __init__(self, settings: TrainerSettings, ranks: ModelRanks, disk: DiskRetry) -> None:
        super().__init__(settings.policies_dir / EXTERNAL, "external_weights", "an export")
        self._settings, self._ranks, self._disk = settings, ranks, disk

    def save(self, logged: LoggedCommand, command: SaveExternal) -> Exported:
        """Export the present weights of a model. Raises CommandRefused."""
        if not self.is_written(logged, command.name):
            self.check_free(logged, command.name)
            snapshot = self._ranks.snapshot(logged.model_id)
            self._disk.until_written(
                f"export {command.name}",
                lambda: self.write_files(logged, command.name, lambda place: self._write(snapshot, place)),
            )
        place = self.place(logged, command.name).resolve()
        return Exported(str(place), self.size(logged, command.name))

    def _write(self, snapshot: PublishedWeights, directory: Path) -> None:
        if isinstance(snapshot, AdapterSnapshot):
            replace(snapshot, config=self._named_base(snapshot.config)).write(directory)
        else:
            copy_small_files(self._settings.model_path, directory)
            snapshot.write(directory)

    def _named_base(self, config: bytes) -> bytes:
        """PEFT's configuration with the base model's name in commands: users lack the trainer's disk."""
        if not self._settings.base_models:
            return config
        named = json.loads(config) | {"base_model_name_or_path": self._settings.base_models[0]}
        return f"{json.dumps(named, indent=2, sort_keys=True)}\n".encode()
