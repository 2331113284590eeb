"""Carries out commands, one after the other, and returns the result of each.

LoggedCommand ─ check ─▶ refused, with nothing changed
                  └────▶ carried out on all ranks ─▶ Result
"""

import logging
import math
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import msgspec

from rollout_queue.contract.packed_tokens import Logprobs
from rollout_queue.trainer_commands import (
    CommandFailed,
    Created,
    CreateModel,
    ForwardBackward,
    LoadWeights,
    LoggedCommand,
    LoraSpec,
    OptimStep,
    Passed,
    Refused,
    Result,
    Saved,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    Stepped,
    WeightsLoaded,
)
from trainer_service.algorithms.summed_losses import LossRefused
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.passes import (
    CommandRefused,
    DatumLimits,
    PassValues,
    PassWork,
    check_rates,
    checked_pass,
)
from trainer_service.commands.sampler_weights import NotPublished, SamplerWeights
from trainer_service.commands.saved_models import Exports, LiveModel, ModelProgress, ModelRecord, SavedModels
from trainer_service.model.checkpoint_layout import BaseModel, LayoutRefused, NotConverted
from trainer_service.model.trained_models import ModelRefused
from trainer_service.settings import TrainerSettings
from trainer_service.storage.durable_files import DiskRetry

logger = logging.getLogger(__name__)


class StepMade(NamedTuple):
    """An optimizer step that a command has made."""

    model_id: str
    tokens: int
    metrics: dict[str, float]


class CommandExecutor:
    """The models by their ids, and what commands do to them."""

    def __init__(
        self,
        settings: TrainerSettings,
        base: BaseModel,
        ranks: ModelRanks,
        saved: SavedModels,
        exports: Exports,
        sampler: SamplerWeights,
        disk: DiskRetry,
        settle: Callable[[], None],
        beat: Callable[[], None],
        stepped: Callable[[StepMade], None],
    ) -> None:
        """`settle` waits until the checkpoint that is written in the background is. `beat` is called during
        passes, and `stepped` after each optimizer step."""
        self._settings, self._ranks, self._saved, self._sampler = settings, ranks, saved, sampler
        self._base, self._exports = base, exports
        self._disk, self._settle, self._beat, self._stepped = disk, settle, beat, stepped
        self._models: dict[str, LiveModel] = {}
        bounds = [each for each in (settings.algorithm.max_row_tokens, ranks.longest_row) if each]
        self._limits = DatumLimits(ranks.vocab_size, min(bounds, default=None))

    def resume(self, records: list[ModelRecord]) -> None:
        """Continue with the models that a checkpoint has restored on all ranks."""
        self._models = {record.model_id: LiveModel.of(record) for record in records}

    @property
    def model_ids(self) -> set[str]:
        return set(self._models)

    def contains(self, command: LoggedCommand) -> bool | None:
        """Whether its model contains a command; None if there is no such model."""
        model = self._models.get(command.model_id)
        return None if model is None else model.contains(command.position)

    def records(self, position: str) -> list[ModelRecord]:
        """What a checkpoint has of each model, when all commands up to this place are carried out."""
        return [
            self._record(model_id, model, model.stored(position)) for model_id, model in self._models.items()
        ]

    def execute(self, command: LoggedCommand) -> Result:
        """Carry out a command. A command that fails has changed nothing, except that an optimizer step whose
        gradient is not finite drops that gradient."""
        try:
            result = self._carry_out(command)
        except (CommandRefused, LossRefused, ModelRefused) as error:
            result = CommandFailed(str(error), "user")
        except (NotPublished, LayoutRefused, NotConverted) as error:
            result = CommandFailed(str(error), "server")
        if isinstance(result, CommandFailed):
            logger.warning("command %s failed: %s", command.request_id, result.error)
        self.skip(command)
        return result

    def skip(self, command: LoggedCommand) -> None:
        """Note that a command is done. One that publishes counts in any case, so that a replay gives the
        same numbers."""
        if (model := self._models.get(command.model_id)) is not None:
            if isinstance(command.command, SaveForSampler):
                publications = model.progress.publications + 1
                model.progress = msgspec.structs.replace(model.progress, publications=publications)
            model.advance(command.position)

    def remove(self, model_id: str) -> None:
        """Free a model."""
        del self._models[model_id]
        self._ranks.remove(model_id)

    def _carry_out(self, logged: LoggedCommand) -> Result:
        match logged.command:
            case Refused(error):
                return CommandFailed(error, "user")
            case CreateModel() as create:
                return self._create(logged, create)
            case LoadWeights() as load:
                return self._load(logged, load)
        model = self._models.get(logged.model_id)
        if model is None:
            raise CommandRefused(f"there is no model {logged.model_id}: its creation failed, or it has ended")
        match logged.command:
            case ForwardBackward() as command:
                return self._pass(logged.model_id, model, command)
            case OptimStep() as rates:
                return self._step(logged.model_id, model, rates)
            case SaveWeights() as save:
                return self._save(logged, model, save)
            case SaveExternal() as save:
                return self._exports.save(logged, save)
            case SaveForSampler():
                version = model.progress.publications + 1
                steps, adapter = model.progress.steps, model.lora is not None
                return self._sampler.publish(logged.model_id, version, steps, adapter=adapter)

    def _create(self, logged: LoggedCommand, command: CreateModel) -> Result:
        path = self._settings.model_path
        names = self._settings.base_models or [str(path), path.name]
        if command.base_model not in names:
            raise CommandRefused(f"this trainer trains {', '.join(names)}, and not {command.base_model}")
        if logged.model_id in self._models:
            raise CommandRefused(f"there is a model {logged.model_id} already")
        if command.lora is not None and command.lora.rank < 1:
            raise CommandRefused(f"the rank of an adapter must be at least 1, not {command.lora.rank}")
        self._ranks.check(command.lora)
        self._ranks.create(logged.model_id, command.lora)
        self._add(logged.model_id, command.lora, ModelProgress(logged.position))
        return Created()

    def _load(self, logged: LoggedCommand, command: LoadWeights) -> Result:
        """A new model of the files takes the place of the present one. So the optimizer is new if its state
        is not loaded, and a gradient is dropped."""
        path, record = self._saved.find(command.model_id, command.name, logged.position)
        if not self._base.is_named(record.base_model, record.base_digest):
            raise CommandRefused(f"checkpoint {command.name} is of another base model, {record.base_model}")
        present = self._models.get(logged.model_id)
        if present is None:
            self._ranks.check(record.lora)
            progress = ModelProgress(logged.position, record.progress.steps)
        elif not _same_shape(record.lora, present.lora):
            raise CommandRefused(
                f"checkpoint {command.name} has {_named(record.lora)}, and the model {_named(present.lora)}"
            )
        else:
            progress = present.progress
        self._ranks.load(logged.model_id, record.lora, path, record.layout, optimizer=command.optimizer)
        self._add(logged.model_id, record.lora, progress)
        return WeightsLoaded()

    def _pass(self, model_id: str, model: LiveModel, command: ForwardBackward) -> Result:
        loss, rows = checked_pass(command, self._limits)
        most = self._settings.algorithm.micro_batch_tokens
        values = self._ranks.run(PassWork(model_id, loss, rows, command.forward_only, most), self._beat)
        if not command.forward_only:
            model.has_gradient = True
            model.tokens += sum(len(row) for row in rows)
        return _passed(command, values)

    def _step(self, model_id: str, model: LiveModel, rates: OptimStep) -> Result:
        check_rates(rates)
        if not model.has_gradient:
            return Stepped({"grad_norm": 0.0})
        grad_norm = self._ranks.step(model_id, rates)
        tokens, model.has_gradient = model.tokens, False
        if not math.isfinite(grad_norm):
            return CommandFailed(
                f"the norm of the gradient is {grad_norm}: no step was made, and the gradient is dropped",
                "user",
            )
        model.progress = msgspec.structs.replace(model.progress, steps=model.progress.steps + 1)
        metrics = {"grad_norm": grad_norm}
        self._stepped(StepMade(model_id, tokens, metrics | {"learning_rate": rates.learning_rate}))
        return Stepped(metrics)

    def _save(self, logged: LoggedCommand, model: LiveModel, command: SaveWeights) -> Result:
        if not self._saved.is_written(logged, command.name):
            self._saved.check(logged, command)
            self._settle()  # the background writes from the memory of the next copy
            progress = msgspec.structs.replace(model.progress, position=logged.position)
            copy = self._saved.copy(self._record(logged.model_id, model, progress))
            self._disk.until_written(
                f"checkpoint {command.name}", lambda: self._saved.write(logged, command, copy)
            )
        return Saved(self._saved.size(logged, command.name))

    def _add(self, model_id: str, lora: LoraSpec | None, progress: ModelProgress) -> None:
        self._models[model_id] = LiveModel(lora, progress, progress)

    def _record(self, model_id: str, model: LiveModel, progress: ModelProgress) -> ModelRecord:
        layout, base = self._ranks.layout(model.lora), self._base
        return ModelRecord(model_id, base.path, model.lora, layout, progress, base.digest)


def _passed(command: ForwardBackward, values: PassValues) -> Passed:
    lengths = [len(datum) for datum in command.data]
    ends = list(accumulate(lengths))
    parts = (values.lp_PK[end - length : end] for length, end in zip(lengths, ends, strict=True))
    loss = float(values.losses_PK.sum(dtype="float64"))
    return Passed(
        logprobs=tuple(Logprobs(part.ravel().tolist()) for part in parts),
        k=command.data[0].k,
        metrics={"loss:sum": loss, "tokens:sum": float(sum(lengths))},
    )


def _same_shape(one: LoraSpec | None, other: LoraSpec | None) -> bool:
    if one is None or other is None:
        return one is other
    return msgspec.structs.replace(one, seed=None) == msgspec.structs.replace(other, seed=None)


def _named(lora: LoraSpec | None) -> str:
    if lora is None:
        return "all weights"
    layers = [name for name in ("attn", "mlp", "unembed") if getattr(lora, f"train_{name}")]
    return f"an adapter of rank {lora.rank} for {', '.join(layers)}"
