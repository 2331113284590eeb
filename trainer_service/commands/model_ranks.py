"""The calls that ranks make on their part, for commands.

executor ─▶ ModelRanks ─ call ─▶ every rank's Models
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rollout_queue.trainer_commands import LoraSpec, OptimStep
from trainer_service.commands.passes import PassValues, PassWork, run_pass
from trainer_service.model.checkpoint_layout import Layout, converted
from trainer_service.model.host_copies import StateCopy
from trainer_service.model.trained_models import Models, PublishedWeights
from trainer_service.step.rank_communication import SpreadCopy
from trainer_service.step.ranks import RankCall, Ranks


def _no_beat() -> None:
    """Only rank 0 reports that it is alive."""


@dataclass(frozen=True)
class CreateCall(RankCall[Models, None]):
    """Make a model, in place of the one that has its id; with `place`, of the weights in this directory, and
    with `optimizer` of its state."""

    model_id: str
    lora: LoraSpec | None
    place: Path | None = None
    optimizer: bool = False
    universal: bool = False

    def on(self, part: Models) -> None:
        if self.model_id in part:
            part.remove(self.model_id)
        part.create(self.model_id, self.lora)
        if self.place is not None:
            part.load(self.model_id, self.place, optimizer=self.optimizer, universal=self.universal)


@dataclass(frozen=True)
class RemoveCall(RankCall[Models, None]):
    """Free a model."""

    model_id: str

    def on(self, part: Models) -> None:
        part.remove(self.model_id)


@dataclass(frozen=True)
class PassCall(RankCall[Models, PassValues]):
    """Make a pass. On rank 0, `beat` is called between micro-batches."""

    work: PassWork
    beat: Callable[[], None] = _no_beat

    def on(self, part: Models) -> PassValues:
        return run_pass(part, self.work, self.beat)

    def __getstate__(self) -> dict[str, object]:
        """What travels to other ranks: no `beat`, because only rank 0 reports progress."""
        return {**self.__dict__, "beat": _no_beat}


@dataclass(frozen=True)
class StepCall(RankCall[Models, float]):
    """Make an optimizer step."""

    model_id: str
    rates: OptimStep

    def on(self, part: Models) -> float:
        return part[self.model_id].step(self.rates)


@dataclass(frozen=True)
class CopyCall(RankCall[Models, StateCopy]):
    """Copy the states of models into host memory, to be written into these subdirectories."""

    places: Mapping[str, str]
    """By model id."""

    kept: ClassVar[Literal["states"]] = "states"

    def on(self, part: Models) -> StateCopy:
        return StateCopy({place: part[model_id].copy_states() for model_id, place in self.places.items()})


@dataclass(frozen=True)
class SnapshotCall(RankCall[Models, PublishedWeights]):
    """Copy what is published of a model into the memory of rank 0's host."""

    model_id: str

    def on(self, part: Models) -> PublishedWeights:
        return part[self.model_id].snapshot()


class ModelRanks(Ranks[Models]):
    """The models on all ranks."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self.check, self.layers_of, self.layout = models.check, models.layers_of, models.layout
        self.vocab_size, self.longest_row = models.vocab_size, models.longest_row
        self.model_checks = models.model_checks

    def create(self, model_id: str, lora: LoraSpec | None) -> None:
        """Make a new model, which `check` allows."""
        self.call(CreateCall(model_id, lora))

    def load(
        self, model_id: str, lora: LoraSpec | None, place: Path, layout: Layout, *, optimizer: bool
    ) -> None:
        """Make a model of the files in the directory `place`, which were saved with this layout, in place of
        the one that has its id. Raises LayoutRefused or NotConverted; then nothing is changed."""
        if layout.loads_into(self.layout(lora)):
            self.call(CreateCall(model_id, lora, place, optimizer))
            return
        with converted(place.parent, place.name) as tag:
            self.call(CreateCall(model_id, lora, place.parent / tag, optimizer, universal=True))

    def remove(self, model_id: str) -> None:
        self.call(RemoveCall(model_id))

    def run(self, work: PassWork, beat: Callable[[], None]) -> PassValues:
        return self.call(PassCall(work, beat))

    def step(self, model_id: str, rates: OptimStep) -> float:
        return self.call(StepCall(model_id, rates))

    def copy_states(self, places: Mapping[str, str]) -> SpreadCopy:
        """Copy the states of models, by their ids, for these subdirectories of what the copy is written
        to."""
        return self.spread(CopyCall(places))

    def snapshot(self, model_id: str) -> PublishedWeights:
        return self.call(SnapshotCall(model_id))
