"""All models as the weights of one checkpoint.

{checkpoint}/models/{model}/    model.json, and DeepSpeed's shards
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer_service.commands.live_model import RECORD, ModelRecord, safe_name
from trainer_service.commands.ranks import ModelRanks
from trainer_service.model.sharding.base_model import BaseModel
from trainer_service.model.sharding.layout import Layout, LayoutRefused
from trainer_service.model.trained.adapted import HEAD
from trainer_service.step.copy_writers import SpreadCopy

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
