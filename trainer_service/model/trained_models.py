"""All models of one rank: several sets of adapters over one base model, or one model with all weights; each
with its DeepSpeed engine, its passes, its optimizer steps, and its files.

MicroBatch ─ scores ─▶ loss ─ backward ─▶ (more of them) ─ step(rates) ─▶ new weights ─▶ copy_states, snapshot
DeepSpeed's engine ─▶ AdaptedModel ─ activates its adapters ─▶ the base model, which other sets share
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout_queue.trainer_commands import LoraSpec, OptimStep
from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.checkpoint_layout import Layout, LoraLayout
from trainer_service.model.file_copies import FileCopies
from trainer_service.model.forward import TokenScores, scores
from trainer_service.model.huggingface import enable_activation_checkpointing, load_base
from trainer_service.model.logprob_head import LogprobHead
from trainer_service.model.lora import Adapters, AdapterSnapshot
from trainer_service.model.optimizer import make_optimizer, set_rates
from trainer_service.model.packed_attention import Packing
from trainer_service.model.parallel import Parallel, seed_everything
from trainer_service.model.policy import EQUAL_COST_WIDTHS
from trainer_service.model.routers import routers_of
from trainer_service.model.self_check import check_at_start
from trainer_service.model.settings import LoraSettings, ModelSettings
from trainer_service.model.snapshot import SnapshotMemory, WeightSnapshot
from trainer_service.model.zero import deepspeed_config, end_failed_backward, prepare_deepspeed, uses_cuda
from trainer_service.rows.rows import MicroBatch

ATTENTION = ("attn", "attention", "mixer", "mamba")
"""Parts of the names of modules that mix tokens."""
HEAD = "lm_head"
"""The name of the only output head for which engines take adapters."""


class AdaptedModel(torch.nn.Module):
    """The base model with one set of adapters. Its parameters are those of the adapters only, under names
    that do not contain the name of the set. So the files of a checkpoint fit another set of equal shape."""

    def __init__(self, base: Any, adapters: Adapters) -> None:
        super().__init__()
        self._base, self._adapters = (base,), adapters  # in a tuple, the base is no submodule
        for name, parameter in adapters.parameters().items():
            self.register_parameter(name.replace(".", "-"), parameter)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self._adapters.activate()
        return self._base[0](*arguments, **named)


class LayerNames:
    """The names of a model's linear layers, as PEFT selects layers by them. It must be made before the model
    has adapters."""

    def __init__(self, model: Any) -> None:
        linear = [name for name, each in model.named_modules() if type(each) is torch.nn.Linear]
        self._attention = {name for name in linear if _mixes_tokens(name)}
        self._mlp = set(linear) - self._attention
        self.adapts_head = isinstance(getattr(model, HEAD, None), LogprobHead)
        """Whether the output head can have an adapter."""

    def chosen(self, *, attention: bool, mlp: bool, head: bool) -> list[str]:
        """The last parts of the names of the chosen layers. Where other layers have the same last part, it is
        preceded by the name of its module."""
        wanted = (self._attention if attention else set()) | (self._mlp if mlp else set())
        others = {name.rpartition(".")[2] for name in (self._attention | self._mlp) - wanted}
        return sorted({_short(name, others) for name in wanted} | ({HEAD} if head else set()))


def _mixes_tokens(name: str) -> bool:
    return any(part in name.rpartition(".")[0].lower() for part in ATTENTION)


def _short(name: str, others: set[str]) -> str:
    parts = name.split(".")
    return parts[-1] if parts[-1] not in others else ".".join(parts[-2:])


PublishedWeights = AdapterSnapshot | WeightSnapshot
"""What is published of a model."""


@dataclass(frozen=True)
class SharedBase:
    """What all models of a rank have in common."""

    deepspeed: ModuleType
    settings: ModelSettings
    parallel: Parallel
    packing: Packing
    weights: BaseWeights
    """Those of the base model's files."""


class TrainedModel:
    """One rank's part of one model. All ranks make each call together, except `scores`."""

    def __init__(self, shared: SharedBase, base: Any, adapters: Adapters | None) -> None:
        """Without `adapters`, all weights of the base model are trained."""
        settings = shared.settings
        self._shared, self._base, self._adapters = shared, base, adapters
        module = base if adapters is None else AdaptedModel(base, adapters)
        module.requires_grad_(True)
        self._engine, *_ = shared.deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(list(module.parameters()), settings),
            config=deepspeed_config(settings, uses_cuda()),
        )
        self._engine.module.train(settings.recomputes_activations)
        self._copies, self._snapshots = FileCopies(self._engine), SnapshotMemory()

    @cached_property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(each.numel() for each in self._engine.module.parameters())

    def scores(self, batch: MicroBatch) -> TokenScores:
        """The scores of all targets under the present weights."""
        shared = self._shared
        return scores(
            self._engine, batch, shared.packing, self._engine.device, sequence=shared.parallel.sequence
        )

    def tensor(self, values: Any) -> Tensor:
        """A numpy array as a tensor on this rank's device."""
        return torch.from_numpy(values).to(self._engine.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss to that of the next step. The loss is multiplied by the
        number of ranks, because DeepSpeed averages gradients over ranks."""
        try:
            self._engine.backward(loss * self._shared.parallel.ranks, scale_wrt_gas=False)
        except RuntimeError:
            if self._shared.parallel.ranks == 1:  # else DeepSpeed refuses the next pass
                end_failed_backward(self._engine)
            raise

    def step(self, rates: OptimStep) -> float:
        """Make a step of AdamW with these settings and the gradient since the last step. Returns the norm of
        the gradient before clipping; if it is not finite, weights and optimizer are unchanged. In either
        case, no gradient is left."""
        self._activate()
        optimizer = self._engine.optimizer
        set_rates(optimizer, rates)
        self._engine.step()
        if getattr(optimizer, "overflow", False):
            return math.inf
        return float(self._engine.get_global_grad_norm())

    def copy_states(self) -> Callable[[Path], object]:
        """Copy weights and optimizer into host memory. Returns what writes this rank's files of them. The
        former copy may not be used any more."""
        self._activate()
        return self._copies.take({}).write

    def load(self, place: Path, *, optimizer: bool, universal: bool = False) -> None:
        """Read back what a copy of a model of equal shape and layout wrote into the directory `place`, or
        with `universal` what `converted` made of another layout. Raises FileNotFoundError."""
        self._activate()
        self._engine._config.load_universal_checkpoint = universal
        path, _ = self._engine.load_checkpoint(
            str(place.parent),
            tag=place.name,
            load_optimizer_states=optimizer,
            load_lr_scheduler_states=False,
        )
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {place}")
        self._engine.module.train(self._shared.settings.recomputes_activations)

    def snapshot(self) -> PublishedWeights:
        """Copy what is published into the memory of rank 0's host: the adapters, or all weights. It
        overwrites the former snapshot."""
        rank = self._shared.parallel.rank
        if self._adapters is not None:
            return self._adapters.snapshot(self._snapshots, rank)
        weights = self._shared.weights
        return self._snapshots.take(weights.published(self._base), weights.dtypes, rank=rank)

    def close(self) -> None:
        """Free what the model has: its adapters and the state of its optimizer."""
        self._engine.destroy()
        if self._adapters is not None:
            self._adapters.remove()

    def _activate(self) -> None:
        if self._adapters is not None:
            self._adapters.activate()


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
