"""The named checkpoints of models, which users save and load.

{checkpoint_dir}/saved/{model}/{name}/{position}/    model.json, DeepSpeed's shards, and their digests
"""

from pathlib import Path

import msgspec

from rollout_queue.commands.command import LoggedCommand, SaveWeights
from trainer_service.commands.live_model import ModelRecord
from trainer_service.commands.model_states import RecordedCopy, read_record
from trainer_service.commands.named_files import NamedFiles
from trainer_service.commands.ranks import ModelRanks
from trainer_service.commands.validation import CommandRefused
from trainer_service.storage.file_list import Damaged, verify_file_list, write_file_list


class SavedModels(NamedFiles):
    """Writes and finds named checkpoints."""

    def __init__(self, checkpoint_dir: Path, ranks: ModelRanks) -> None:
        super().__init__(checkpoint_dir / "saved", "weights", "a checkpoint")
        self._ranks = ranks

    def check(self, logged: LoggedCommand, command: SaveWeights) -> None:
        """Raises CommandRefused if the name cannot be used, or is used and not to be overwritten."""
        if not command.overwrite:
            self.check_free(logged, command.name)

    def copy(self, record: ModelRecord) -> RecordedCopy:
        """Copy a model's states. The former copy must be written."""
        return RecordedCopy(self._ranks.copy_states({record.model_id: "."}), {".": record})

    def write(self, logged: LoggedCommand, command: SaveWeights, copy: RecordedCopy) -> None:
        """Write a durable checkpoint. Raises DiskTrouble, and leaves no files then."""

        def write(directory: Path) -> None:
            copy.write(directory)
            write_file_list(directory)

        self.write_files(logged, command.name, write)

    def find(self, model_id: str, name: str, before: str) -> tuple[Path, ModelRecord]:
        """The newest checkpoint of this name that was saved before this place in the log. Raises
        CommandRefused."""
        found = self.before(before, model_id, name)
        if not found:
            raise CommandRefused(f"{model_id} has no checkpoint {name}")
        try:
            verify_file_list(found[-1])
            return found[-1], read_record(found[-1])
        except (Damaged, OSError, msgspec.DecodeError) as error:
            raise CommandRefused(f"checkpoint {name} of {model_id} cannot be read: {error}") from error
