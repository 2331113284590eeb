"""The models of several ranks: rank 0 broadcasts calls, and all ranks carry them out at the same time.

rank 0    executor ─▶ ModelRanks ─ call ─┬─▶ its own Models
rank 1 …  follow_models ◀────────────────┴─▶ theirs
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rollout_queue.trainer_commands import LoraSpec, OptimStep
from trainer_service.commands.passes import PassValues, PassWork, run_pass
from trainer_service.model.checkpoint_layout import Layout, converted
from trainer_service.model.file_copies import StateCopy
from trainer_service.model.trained_models import Models, PublishedWeights
from trainer_service.step.rank_communication import CommandChannel, RankThreads, RankWatch
from trainer_service.step.rank_writers import CopyWriter, ShareWriter, ShareWriters, SpreadCopy

Answer = TypeVar("Answer", covariant=True)


class RankCall(Protocol[Answer]):
    """A call that every rank makes on its own models."""

    def on(self, models: Models) -> Answer: ...


@dataclass(frozen=True)
class CreateCall:
    """Make a model, in place of the one that has its id; with `place`, of the weights in this directory, and
    with `optimizer` of its state."""

    model_id: str
    lora: LoraSpec | None
    place: Path | None = None
    optimizer: bool = False
    universal: bool = False

    def on(self, models: Models) -> None:
        if self.model_id in models:
            models.remove(self.model_id)
        models.create(self.model_id, self.lora)
        if self.place is not None:
            models.load(self.model_id, self.place, optimizer=self.optimizer, universal=self.universal)


@dataclass(frozen=True)
class RemoveCall:
    """Free a model."""

    model_id: str

    def on(self, models: Models) -> None:
        models.remove(self.model_id)


@dataclass(frozen=True)
class PassCall:
    """Make a pass."""

    work: PassWork

    def on(self, models: Models) -> PassValues:
        return run_pass(models, self.work)


@dataclass(frozen=True)
class StepCall:
    """Make an optimizer step."""

    model_id: str
    rates: OptimStep

    def on(self, models: Models) -> float:
        return models[self.model_id].step(self.rates)


@dataclass(frozen=True)
class DiscardCall:
    """Drop the gradient of a model."""

    model_id: str

    def on(self, models: Models) -> None:
        models[self.model_id].discard_gradients()


@dataclass(frozen=True)
class CopyCall:
    """Copy the states of models into host memory, to be written into these subdirectories."""

    places: Mapping[str, str]
    """By model id."""

    def on(self, models: Models) -> StateCopy:
        return StateCopy({place: models[model_id].copy_states() for model_id, place in self.places.items()})


@dataclass(frozen=True)
class SnapshotCall:
    """Copy what is published of a model into the memory of rank 0's host."""

    model_id: str

    def on(self, models: Models) -> PublishedWeights:
        return models[self.model_id].snapshot()


class ModelRanks:
    """The models on all ranks. Only rank 0 has an instance."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._channel = CommandChannel[RankCall[object]](models.ranks)
        self._writers, self._copies = ShareWriters(models.ranks), RankThreads[Path, None](models.ranks)
        self._watch = RankWatch(models.ranks, models.rank_timeout_s)
        self.check, self.layers_of, self.layout = models.check, models.layers_of, models.layout
        self.vocab_size, self.longest_row = models.vocab_size, models.longest_row
        self.model_checks = models.model_checks

    def require_shared(self, checkpoint_dir: Path) -> None:
        """Raises SystemExit, and ends the other ranks, if one of them cannot write rank 0's directory."""
        if lacking := self._writers.without(checkpoint_dir):
            self.close()
            raise SystemExit(
                f"trainer.checkpoint_dir: ranks {lacking} cannot write rank 0's directory {checkpoint_dir}"
            )

    def create(self, model_id: str, lora: LoraSpec | None) -> None:
        """Make a new model, which `check` allows."""
        self._call(CreateCall(model_id, lora))

    def load(
        self, model_id: str, lora: LoraSpec | None, place: Path, layout: Layout, *, optimizer: bool
    ) -> None:
        """Make a model of the files in the directory `place`, which were saved with this layout, in place of
        the one that has its id. Raises LayoutRefused or NotConverted; then nothing is changed."""
        if layout.loads_into(self.layout(lora)):
            self._call(CreateCall(model_id, lora, place, optimizer))
            return
        with converted(place.parent, place.name) as tag:
            self._call(CreateCall(model_id, lora, place.parent / tag, optimizer, universal=True))

    def remove(self, model_id: str) -> None:
        """Free a model."""
        self._call(RemoveCall(model_id))

    def run(self, work: PassWork, beat: Callable[[], None]) -> PassValues:
        """Make a pass. `beat` is called between micro-batches."""
        self._channel.send(PassCall(work))
        return run_pass(self._models, work, beat)

    def step(self, model_id: str, rates: OptimStep) -> float:
        """Make an optimizer step, as `TrainedModel.step`."""
        return self._call(StepCall(model_id, rates))

    def discard_gradients(self, model_id: str) -> None:
        """Drop the gradient of a model."""
        self._call(DiscardCall(model_id))

    def copy_states(self, places: Mapping[str, str]) -> SpreadCopy:
        """Copy the states of models, by their ids, for these subdirectories of what the copy is written to.
        The copy must be written before the next one is taken."""
        own = self._call(CopyCall(places))
        self._channel.wait_for_all()  # only then, threads of the other ranks may write the copy
        return SpreadCopy(own, self._copies)

    def snapshot(self, model_id: str) -> PublishedWeights:
        """Copy what is published of a model."""
        return self._call(SnapshotCall(model_id))

    def close(self) -> None:
        """End the other ranks. Do not call this after a failure: a rank that waits in a collective receives
        no call."""
        self._writers.close()
        self._copies.close()
        self._channel.send(None)
        self._watch.close()
        self._channel.close()

    def _call(self, call: RankCall[Answer]) -> Answer:
        self._channel.send(call)
        return call.on(self._models)


def follow_models(models: Models) -> None:
    """Carry out rank 0's calls until it sends None. Raises RuntimeError if rank 0 is gone."""
    channel, writer = CommandChannel[RankCall[object]](models.ranks), ShareWriter(models.ranks)
    copies = CopyWriter(models.ranks)
    watch = RankWatch(models.ranks, models.rank_timeout_s)
    while (call := channel.receive()) is not None:
        if isinstance(call, CopyCall):
            copies.forget()
        answer = call.on(models)
        if isinstance(answer, StateCopy):
            copies.copy = answer
            channel.wait_for_all()
    writer.join()
    copies.join()
    watch.close()
    channel.close()
