"""The named checkpoints of models, which users save and load.

{checkpoint_dir}/saved/{model}/{name}/{position}/    model.json, DeepSpeed's shards, and their digests

A checkpoint that is overwritten stays until no replay of the log can ask for it: a `load_weights` takes the
newest one that was saved before it in the log. Likewise one that is deleted: it is gone for the commands
after the deletion, and its files stay until no replay can ask for them.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rollout_queue.commands.command import LoggedCommand, SaveWeights
from rollout_queue.commands.log import BEGINNING, Dropped
from trainer_service.commands.live_model import SAFE_NAME, ModelRecord, place_in, safe_name
from trainer_service.commands.model_states import RecordedCopy, read_record
from trainer_service.commands.ranks import ModelRanks
from trainer_service.commands.validation import CommandRefused
from trainer_service.storage.disk import written
from trainer_service.storage.file_list import Damaged, verify_file_list, write_file_list
from trainer_service.storage.files import sync_directory, sync_tree

ASIDE = ".tmp"


class SavedModels:
    """Writes and finds named checkpoints. A name has a directory for each time it was saved."""

    def __init__(self, checkpoint_dir: Path, ranks: ModelRanks) -> None:
        self._root, self._ranks = checkpoint_dir / "saved", ranks
        self.dropped = Dropped({}, {})
        """What is deleted, as far as the commands know that are carried out."""

    def check(self, logged: LoggedCommand, command: SaveWeights) -> None:
        """Raises CommandRefused if the name cannot be used, or is used and not to be overwritten."""
        earlier = self._before(logged.position, logged.model_id, command.name)
        if earlier and not command.overwrite:
            raise CommandRefused(f"{logged.model_id} has a checkpoint {command.name} already")

    def is_written(self, logged: LoggedCommand, command: SaveWeights) -> bool:
        """Whether this very command has written its checkpoint before."""
        return (self._named(logged.model_id, command.name) / logged.position).exists()

    def copy(self, record: ModelRecord) -> RecordedCopy:
        """Copy a model's states. The former copy must be written."""
        return RecordedCopy(self._ranks.copy_states({record.model_id: "."}), {".": record})

    def write(self, logged: LoggedCommand, command: SaveWeights, copy: RecordedCopy) -> None:
        """Write a durable checkpoint. Raises DiskTrouble, and leaves no files then."""
        final = self._named(logged.model_id, command.name) / logged.position
        aside = final.with_name(f"{final.name}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)  # of a process that died
        with written(f"checkpoint {command.name}", lambda: shutil.rmtree(aside, ignore_errors=True)):
            aside.mkdir(parents=True)
            copy.write(aside)
            write_file_list(aside)
            sync_tree(aside)
            aside.rename(final)
            for directory in (final.parent, final.parent.parent, self._root, self._root.parent):
                sync_directory(directory)

    def size(self, logged: LoggedCommand, command: SaveWeights) -> int:
        """How many bytes the checkpoint takes that this command has written."""
        directory = self._named(logged.model_id, command.name) / logged.position
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

    def find(self, model_id: str, name: str, before: str) -> tuple[Path, ModelRecord]:
        """The newest checkpoint of this name that was saved before this place in the log. Raises
        CommandRefused."""
        found = self._before(before, model_id, name)
        if not found:
            raise CommandRefused(f"{model_id} has no checkpoint {name}")
        try:
            verify_file_list(found[-1])
            return found[-1], read_record(found[-1])
        except (Damaged, OSError, msgspec.DecodeError) as error:
            raise CommandRefused(f"checkpoint {name} of {model_id} cannot be read: {error}") from error

    def prune(self, position: str) -> None:
        """Remove what was overwritten by commands up to this place, which no replay begins before."""
        for name in self._root.glob("*/*"):
            for old in self._up_to(position, name)[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def remove(self, model_id: str, name: str, saved: str) -> None:
        """Remove what was saved under a name up to this place in the log. Raises OSError if files stay."""
        directory = self._named(model_id, name)
        for old in self._up_to(saved, directory):
            shutil.rmtree(old)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()

    def _named(self, model_id: str, name: str) -> Path:
        if not SAFE_NAME.fullmatch(name):
            raise CommandRefused(
                f"{name!r} is no name of a checkpoint: take 1 to 64 letters, digits, dots, dashes and "
                "underscores, the first a letter or a digit"
            )
        return self._root / safe_name(model_id) / name

    def _before(self, position: str, model_id: str, name: str) -> list[Path]:
        """What was saved under a name before this place in the log, and not deleted before it."""
        drops = self.dropped.weights.get((model_id, f"weights/{name}"), ())
        gone = [place_in(each.saved) for each in drops if place_in(each.deleted) < place_in(position)]
        first, saved = max(gone, default=place_in(BEGINNING)), _saved(self._named(model_id, name))
        return [each for each in saved if first < place_in(each.name) < place_in(position)]

    def _up_to(self, position: str, name: Path) -> list[Path]:
        return [each for each in _saved(name) if place_in(each.name) <= place_in(position)]


def _saved(name: Path) -> list[Path]:
    """The checkpoints of a name, in the order of the log."""
    return sorted(_complete(name), key=lambda path: place_in(path.name))


def _complete(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from (each for each in name.iterdir() if not each.name.endswith(ASIDE))
