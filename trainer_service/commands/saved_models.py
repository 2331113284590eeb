"""The files that commands save under names: checkpoints of models, exports of models, and the states of all
models as the weights of one checkpoint.

{checkpoint_dir}/saved/{model}/{name}/{position}/     model.json, DeepSpeed's shards, and their digests
{policies_dir}/external/{model}/{name}/{position}/    what other programs read, for download
    an adapter   adapter_config.json, adapter_model.safetensors: PEFT's layout
    all weights  config.json, the tokenizer, model.safetensors or several with an index: Hugging Face's
{checkpoint}/models/{model}/                          model.json, and DeepSpeed's shards

Files that are overwritten stay until no replay of the log can ask for them: a command that reads a name takes
the newest files that were saved before it in the log. Likewise files that are deleted: they are gone for the
commands after the deletion, and stay on the disk until no replay can ask for them.

What is known of a model, and what a checkpoint stores of it:

gradient?   no ── forward_backward ─▶ yes ── optim_step, load_weights ─▶ no
progress    present ─────────────── the last one without a gradient ────▶ a checkpoint has this one
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rollout_queue.trainer_commands import (
    BEGINNING,
    Dropped,
    Exported,
    LoggedCommand,
    LoraSpec,
    SaveExternal,
    SaveWeights,
)
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.passes import CommandRefused
from trainer_service.model.checkpoint_layout import BaseModel, Layout, LayoutRefused
from trainer_service.model.huggingface import copy_small_files
from trainer_service.model.lora import AdapterSnapshot
from trainer_service.model.trained_models import HEAD, PublishedWeights
from trainer_service.settings import TrainerSettings
from trainer_service.step.rank_communication import SpreadCopy
from trainer_service.storage.durable_files import (
    Damaged,
    DiskRetry,
    sync_directory,
    sync_tree,
    verify_file_list,
    write_file_list,
    written,
)

RECORD = "model.json"
"""The file with a ModelRecord, beside the files of a model's states."""
SAFE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
"""Names of directories and adapters."""


class ModelProgress(msgspec.Struct, frozen=True):
    """How far a model is."""

    position: str
    """The place in the log of the last command that it contains."""
    steps: int = 0
    publications: int = 0
    """How many of its commands were to publish it, whether or not they failed. It numbers its adapters."""


class ModelRecord(msgspec.Struct, frozen=True):
    """What is stored beside the files of a model."""

    model_id: str
    base_model: str
    """The trainer's `model_path`."""
    lora: LoraSpec | None
    layout: Layout
    progress: ModelProgress
    base_digest: str = ""
    """Tells its base model from others at the same path; empty in records of older builds."""


@dataclass
class LiveModel:
    """A model in memory. It is changed only by the executor."""

    lora: LoraSpec | None
    progress: ModelProgress
    clean: ModelProgress
    """The progress at the last command after which there was no gradient. Its weights are the present ones:
    only commands that leave no gradient change weights."""
    has_gradient: bool = False
    tokens: int = 0
    """The tokens of the present gradient."""

    @classmethod
    def of(cls, record: ModelRecord) -> "LiveModel":
        return cls(record.lora, record.progress, record.progress)

    def contains(self, position: str) -> bool:
        """Whether the model contains the command at this place."""
        return place_in(position) <= place_in(self.progress.position)

    def advance(self, position: str) -> None:
        """Note that the model contains the command at this place."""
        self.progress = msgspec.structs.replace(self.progress, position=position)
        if not self.has_gradient:
            self.clean, self.tokens = self.progress, 0

    def stored(self, position: str) -> ModelProgress:
        """The progress that a checkpoint has, made when every model contains its commands up to this place.
        While commands are read again, a model may be further."""
        if self.has_gradient or self.contains(position):
            return self.clean
        return msgspec.structs.replace(self.progress, position=position)


def place_in(position: str) -> tuple[int, ...]:
    """A position as numbers, which are in the order of the log."""
    return tuple(int(part) for part in position.split("-"))


def safe_name(model_id: str) -> str:
    """A name for directories and adapters. Two models never have the same."""
    if SAFE_NAME.fullmatch(model_id):
        return model_id
    digest = hashlib.sha256(model_id.encode()).hexdigest()[:16]
    readable = re.sub(r"[^a-zA-Z0-9]+", "-", model_id).strip("-")[:40]
    return f"{readable or 'model'}.{digest}"


MODELS = "models"


@dataclass(frozen=True)
class RecordedCopy:
    """The copies of some models, and their records."""

    states: SpreadCopy
    records: Mapping[str, ModelRecord]
    """By the subdirectory of each model; "." is none."""

    def write(self, directory: Path) -> None:
        """Write everything below `directory`. Raises OSError, or the RuntimeError of torch's writer."""
        self.states.write(directory)
        for place, record in self.records.items():
            (directory / place / RECORD).write_bytes(msgspec.json.encode(record))


class ModelStates:
    """The models of a trainer, as `Checkpoints` copies and reads them."""

    def __init__(self, base: BaseModel, ranks: ModelRanks, records: Callable[[], list[ModelRecord]]) -> None:
        """`records` tells what a checkpoint has of each model now."""
        self._base, self._ranks, self._records = base, ranks, records
        self.restored: list[ModelRecord] = []
        """The models that the last `load` has made."""

    @property
    def layout(self) -> Layout:
        sharded = self._ranks.layout(None)
        return msgspec.structs.replace(sharded, source="commands", base_digest=self._base.digest)

    def copy_states(self) -> RecordedCopy:
        records = {f"{MODELS}/{safe_name(record.model_id)}": record for record in self._records()}
        places = {record.model_id: place for place, record in records.items()}
        return RecordedCopy(self._ranks.copy_states(places), records)

    def load(self, directory: Path, tag: str, layout: Layout | None, rate_scale: float = 1.0) -> None:
        """Make all models of a checkpoint. Each has its own layout; `layout` is that of the run, and
        `rate_scale` is not used. Raises LayoutRefused and NotConverted."""
        self.restored = []
        if layout is not None:
            layout.refuse_other_run(self.layout)
        for path in sorted((directory / tag / MODELS).glob(f"*/{RECORD}")):
            record = read_record(path.parent)
            if not self._base.is_named(record.base_model, record.base_digest):
                raise LayoutRefused(f"it has models over another base model, {record.base_model}")
            self._ranks.load(record.model_id, record.lora, path.parent, record.layout, optimizer=True)
            self.restored.append(record)


def read_record(directory: Path) -> ModelRecord:
    """The record of the model in this directory. Older builds adapted no head, whatever was asked for."""
    record = msgspec.json.decode((directory / RECORD).read_bytes(), type=ModelRecord)
    if record.lora is None or record.layout.lora is None or HEAD in record.layout.lora.target_modules:
        return record
    return msgspec.structs.replace(record, lora=msgspec.structs.replace(record.lora, train_unembed=False))


ASIDE = ".tmp"


class NamedFiles:
    """Files of one kind. A name has a directory for each time it was saved."""

    def __init__(self, root: Path, kind: str, noun: str) -> None:
        """`kind` is the first part of the names in the log; `noun` is what users call such files."""
        self._root, self._kind, self._noun = root, kind, noun
        self.dropped = Dropped({}, {})
        """What is deleted, as far as the commands know that are carried out."""

    def check_free(self, logged: LoggedCommand, name: str) -> None:
        """Raises CommandRefused if the name cannot be used, or is used already."""
        if self.before(logged.position, logged.model_id, name):
            raise CommandRefused(f"{logged.model_id} has {self._noun} {name} already")

    def place(self, logged: LoggedCommand, name: str) -> Path:
        """The directory of what this command saves. Raises CommandRefused for a name that cannot be used."""
        return self._named(logged.model_id, name) / logged.position

    def is_written(self, logged: LoggedCommand, name: str) -> bool:
        """Whether this very command has written its files before."""
        return self.place(logged, name).exists()

    def write_files(self, logged: LoggedCommand, name: str, write: Callable[[Path], object]) -> None:
        """Have `write` write the files, durably and all or none. Raises DiskRefused, and leaves no files
        then."""
        final = self.place(logged, name)
        aside = final.with_name(f"{final.name}{ASIDE}")
        shutil.rmtree(aside, ignore_errors=True)  # of a process that died
        with written(f"{self._kind}/{name}", lambda: shutil.rmtree(aside, ignore_errors=True)):
            aside.mkdir(parents=True)
            write(aside)
            sync_tree(aside)
            aside.rename(final)
            for directory in (final.parent, final.parent.parent, self._root, self._root.parent):
                sync_directory(directory)

    def size(self, logged: LoggedCommand, name: str) -> int:
        """How many bytes the files take that this command has written."""
        return sum(path.stat().st_size for path in self.place(logged, name).rglob("*") if path.is_file())

    def before(self, position: str, model_id: str, name: str) -> list[Path]:
        """What was saved under a name before this place in the log, and not deleted before it."""
        drops = self.dropped.weights.get((model_id, f"{self._kind}/{name}"), ())
        gone = [place_in(each.saved) for each in drops if place_in(each.deleted) < place_in(position)]
        first, saved = max(gone, default=place_in(BEGINNING)), _saved(self._named(model_id, name))
        return [each for each in saved if first < place_in(each.name) < place_in(position)]

    def prune(self, position: str) -> None:
        """Remove what was overwritten by commands up to this place, which no replay begins before."""
        for name in self._root.glob("*/*"):
            for old in _up_to(position, name)[:-1]:
                shutil.rmtree(old, ignore_errors=True)

    def remove(self, model_id: str, name: str, saved: str) -> None:
        """Remove what was saved under a name up to this place in the log. Raises OSError if files stay."""
        directory = self._named(model_id, name)
        for old in _up_to(saved, directory):
            shutil.rmtree(old)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()

    def remove_all(self, model_id: str) -> None:
        """Remove what is left of a model that is gone: what a process had written that died before it could
        answer. Raises OSError if files stay."""
        directory = self._root / safe_name(model_id)
        if directory.is_dir():
            shutil.rmtree(directory)

    def _named(self, model_id: str, name: str) -> Path:
        if not SAFE_NAME.fullmatch(name):
            raise CommandRefused(
                f"{name!r} is no name of {self._noun}: take 1 to 64 letters, digits, dots, dashes and "
                "underscores, the first a letter or a digit"
            )
        return self._root / safe_name(model_id) / name


def _up_to(position: str, name: Path) -> list[Path]:
    return [each for each in _saved(name) if place_in(each.name) <= place_in(position)]


def _saved(name: Path) -> list[Path]:
    """The complete directories of a name, in the order of the log."""
    return sorted(_complete(name), key=lambda path: place_in(path.name))


def _complete(name: Path) -> Iterator[Path]:
    if name.is_dir():
        yield from (each for each in name.iterdir() if not each.name.endswith(ASIDE))


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
        """Write a durable checkpoint. Raises DiskRefused, and leaves no files then."""

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
