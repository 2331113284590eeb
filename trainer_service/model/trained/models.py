"""All models of one rank: several sets of adapters over one base model, or one model with all weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollout_queue.commands.command import LoraSpec
from trainer_service.model.attention.packed_attention import Packing
from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.huggingface import enable_activation_checkpointing, load_base
from trainer_service.model.lora import Adapters
from trainer_service.model.policy import EQUAL_COST_WIDTHS
from trainer_service.model.routers import routers_of
from trainer_service.model.self_check.start import check_at_start
from trainer_service.model.settings import LoraSettings, ModelSettings
from trainer_service.model.sharding.layout import Layout, LoraLayout
from trainer_service.model.sharding.parallel import Parallel
from trainer_service.model.sharding.randomness import seed_everything
from trainer_service.model.sharding.zero import prepare_deepspeed, uses_cuda
from trainer_service.model.trained.adapted import HEAD, LayerNames
from trainer_service.model.trained.trained_model import SharedBase, TrainedModel
from trainer_service.rows.rows import MicroBatch

Value = TypeVar("Value")


class ModelRefused(Exception):
    """A model cannot be made beside those that exist. The message is for the user."""


class Models:
    """The models of this rank by their ids. All ranks make each call together."""

    def __init__(self, settings: ModelSettings) -> None:
        """The `zero_stage` must be below 3."""
        self._settings = settings
        weights = BaseWeights.checked(settings.model_path)
        deepspeed = prepare_deepspeed(settings)
        seed_everything(settings.seed)
        self._parallel = Parallel.joined(settings.sequence_parallel)
        self.rank, self.ranks = self._parallel.rank, self._parallel.ranks
        self.rank_timeout_s = settings.rank_timeout_s
        base = self._loaded()
        self._base: Any | None = base
        """None once all its weights were trained; then it is loaded again for the next model."""
        self._checked = check_at_start(base, settings, self._parallel)
        self.model_checks = (*weights.checks, *self._checked.checks)
        """What was found out about the model at the start."""
        self._packing = self._checked.packing
        self._shared = SharedBase(deepspeed, settings, self._parallel, self._packing, weights)
        self.vocab_size = int(base.get_input_embeddings().num_embeddings)
        self.longest_row = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        mixture = routers_of(base, settings) is not None
        self.shares_prefixes = settings.share_prefixes and not mixture and self._packing is Packing.SEGMENTS
        self._equal_cost_length = EQUAL_COST_WIDTHS * base.config.get_text_config().hidden_size
        self._layers = LayerNames(base)
        self._models: dict[str, TrainedModel] = {}
        self._full: str | None = None
        self._made = 0
        """How many sets of adapters the present base model has had."""

    def __getitem__(self, model_id: str) -> TrainedModel:
        return self._models[model_id]

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def check(self, lora: LoraSpec | None) -> None:
        """Raises ModelRefused unless such a model can be made now."""
        if self._full is not None:
            raise ModelRefused(
                f"all weights of this trainer's model are trained as {self._full}: it trains no second model"
            )
        if lora is None and self._models:
            raise ModelRefused(
                f"{len(self._models)} adapters of this trainer's model are trained, and beside them its own "
                "weights cannot be. Ask for an adapter (a rank of at least 1)"
            )
        if lora is not None and not self.layers_of(lora):
            raise ModelRefused("no layer is trained: train_mlp, train_attn or train_unembed must be true")
        if lora is not None and lora.train_unembed and not self._layers.adapts_head:
            raise ModelRefused(
                f"this trainer's model has no linear {HEAD}, the only head that engines adapt: train_unembed "
                "must be false"
            )

    def create(self, model_id: str, lora: LoraSpec | None) -> None:
        """Make a model: the base model with new adapters, or with all its weights. `check` must allow it."""
        if self._base is None or (lora is None and self._made):  # the layers of adapters stay in a base model
            self._base, self._made = None, 0
            self._base = self._loaded()
            self._checked.apply(self._base)
        base, adapters = self._base, None
        if lora is None:
            self._base, self._full = None, model_id
        else:
            adapters = self._new_adapters(base, lora)
        self._models[model_id] = TrainedModel(self._shared, base, adapters)

    def remove(self, model_id: str) -> None:
        """Free a model's memory."""
        self._models.pop(model_id).close()
        if self._full == model_id:
            self._full = None

    def layers_of(self, lora: LoraSpec) -> list[str]:
        """The names of the layers that get an adapter."""
        return self._layers.chosen(attention=lora.train_attn, mlp=lora.train_mlp, head=lora.train_unembed)

    def layout(self, lora: LoraSpec | None) -> Layout:
        """How the files of such a model are sharded."""
        settings = self._settings
        shape = LoraLayout(lora.rank, self._alpha, self.layers_of(lora)) if lora else None
        return Layout(self.ranks, settings.sharding_stage, settings.precision, shape)

    def load(self, model_id: str, place: Path, *, optimizer: bool, universal: bool) -> None:
        """Read weights, and with `optimizer` its state, into a model that has just been made, from the
        directory of a copy, or with `universal` of what `converted` made of one."""
        self._models[model_id].load(place, optimizer=optimizer, universal=universal)
        torch.distributed.barrier()  # after it, rank 0 removes a converted copy

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This rank's share of the micro-batches. False marks one that only keeps the number of passes equal
        on all ranks."""
        if self._packing is Packing.ONE_ROW:
            batches = [row for batch in batches for row in batch.single_rows()]
        return self._parallel.own_share(batches, self._equal_cost_length)

    def all_gather(self, values: list[Value]) -> list[Value]:
        """The values of all ranks, on every rank. The values must be on the CPU."""
        return self._parallel.all_gather(values)

    @property
    def _alpha(self) -> float:
        return (self._settings.lora or LoraSettings()).alpha

    def _new_adapters(self, base: Any, lora: LoraSpec) -> Adapters:
        """Adapters whose first weights depend only on the seed. Every set has a name of its own."""
        self._made += 1
        chosen = LoraSettings(rank=lora.rank, alpha=self._alpha, target_modules=self.layers_of(lora))
        devices = [torch.cuda.current_device()] if uses_cuda() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self._settings.seed if lora.seed is None else lora.seed)
            return Adapters(base, chosen, self._settings.model_path, f"set{self._made}")

    def _loaded(self) -> Any:
        """The base model on this rank's device, frozen."""
        settings = self._settings
        base = load_base(settings)
        if settings.recomputes_activations:
            enable_activation_checkpointing(base)
        base.requires_grad_(False).train(settings.recomputes_activations)
        return base.to(torch.cuda.current_device() if uses_cuda() else "cpu")
