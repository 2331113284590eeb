"""All models of one rank: several sets of adapters over one base model, or one model with all weights; each
with its DeepSpeed engine, its passes, its optimizer steps, and its files.

MicroBatch ─ scores ─▶ loss ─ backward ─▶ (more of them) ─ step(rates) ─▶ new weights ─▶ copy_states, snapshot
DeepSpeed's engine ─▶ AdaptedModel ─ activates its adapters ─▶ the base model, which other sets share
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rollout_queue.trainer_commands import LoraSpec, OptimStep
from trainer_service.model.checkpoint_layout import Layout, LoraLayout
from trainer_service.model.forward import TokenScores, scores
from trainer_service.model.host_copies import SnapshotMemory, WeightSnapshot
from trainer_service.model.huggingface import enable_activation_checkpointing, load_base
from trainer_service.model.logprob_head import LogprobHead
from trainer_service.model.lora import Adapters, AdapterSnapshot
from trainer_service.model.optimizer import set_rates
from trainer_service.model.rank_model import RankBase, TrainedEngine
from trainer_service.model.settings import LoraSettings, ModelSettings
from trainer_service.model.zero import uses_cuda
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


class TrainedModel(TrainedEngine):
    """One rank's part of one model. All ranks make each call together, except `scores`."""

    def __init__(self, base: "Models", module: Any, adapters: Adapters | None) -> None:
        """Without `adapters`, all weights of the base model `module` are trained."""
        self._base, self._adapters, self._whole = base, adapters, module
        trained = module if adapters is None else AdaptedModel(module, adapters)
        trained.requires_grad_(True)
        super().__init__(base.deepspeed, trained, base.settings, scheduled=False)
        self._snapshots = SnapshotMemory()

    @cached_property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(each.numel() for each in self._engine.module.parameters())

    def scores(self, batch: MicroBatch) -> TokenScores:
        """The scores of all targets under the present weights."""
        base, device = self._base, self._engine.device
        return scores(self._engine, batch, base.packing, device, sequence=base.parallel.sequence)

    def step(self, rates: OptimStep) -> float:
        """Make a step of AdamW with these settings and the gradient since the last step, as `make_step`."""
        self._activate()
        set_rates(self._engine.optimizer, rates)
        return self.make_step()

    def copy_states(self) -> Callable[[Path], object]:
        """Copy weights and optimizer into host memory. Returns what writes this rank's files of them."""
        self._activate()
        return self.copied_files().write

    def load(self, place: Path, *, optimizer: bool, universal: bool = False) -> None:
        """Read back what a copy of a model of equal shape and layout wrote into the directory `place`, or
        with `universal` what `converted` made of another layout. Raises FileNotFoundError."""
        self._activate()
        parts = {"load_optimizer_states": optimizer, "load_lr_scheduler_states": False}
        self.read_files(place.parent, place.name, universal=universal, **parts)

    def snapshot(self) -> PublishedWeights:
        """Copy what is published into the memory of rank 0's host: the adapters, or all weights. It
        overwrites the former snapshot."""
        if self._adapters is not None:
            return self._adapters.snapshot(self._snapshots, self._base.rank)
        weights = self._base.weights
        return self._snapshots.take(weights.published(self._whole), weights.dtypes, rank=self._base.rank)

    def close(self) -> None:
        """Free what the model has: its adapters and the state of its optimizer."""
        self._engine.destroy()
        if self._adapters is not None:
            self._adapters.remove()

    def _activate(self) -> None:
        if self._adapters is not None:
            self._adapters.activate()


class ModelRefused(Exception):
    """A model cannot be made beside those that exist. The message is for the user."""


class Models(RankBase):
    """The models of this rank by their ids. All ranks make each call together."""

    def __init__(self, settings: ModelSettings) -> None:
        """The `zero_stage` must be below 3."""
        super().__init__(settings)
        base = _frozen_base(settings)
        self.examine(base)
        self._base: Any | None = base
        """None once all its weights were trained; then it is loaded again for the next model."""
        self.longest_row = getattr(base.config.get_text_config(), "max_position_embeddings", None)
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
            self._base = _frozen_base(self.settings)
            self.checked.apply(self._base)
        base, adapters = self._base, None
        if lora is None:
            self._base, self._full = None, model_id
        else:
            adapters = self._new_adapters(base, lora)
        self._models[model_id] = TrainedModel(self, base, adapters)

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
        settings = self.settings
        shape = LoraLayout(lora.rank, self._alpha, self.layers_of(lora)) if lora else None
        return Layout(self.ranks, settings.sharding_stage, settings.precision, shape)

    def load(self, model_id: str, place: Path, *, optimizer: bool, universal: bool) -> None:
        """Read weights, and with `optimizer` its state, into a model that has just been made, from the
        directory of a copy, or with `universal` of what `converted` made of one."""
        self._models[model_id].load(place, optimizer=optimizer, universal=universal)
        torch.distributed.barrier()  # after it, rank 0 removes a converted copy

    @property
    def _alpha(self) -> float:
        return (self.settings.lora or LoraSettings()).alpha

    def _new_adapters(self, base: Any, lora: LoraSpec) -> Adapters:
        """Adapters whose first weights depend only on the seed. Every set has a name of its own."""
        self._made += 1
        chosen = LoraSettings(rank=lora.rank, alpha=self._alpha, target_modules=self.layers_of(lora))
        devices = [torch.cuda.current_device()] if uses_cuda() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.settings.seed if lora.seed is None else lora.seed)
            return Adapters(base, chosen, self.settings.model_path, f"set{self._made}")


def _frozen_base(settings: ModelSettings) -> Any:
    """The base model on this rank's device, frozen."""
    base = load_base(settings)
    if settings.recomputes_activations:
        enable_activation_checkpointing(base)
    base.requires_grad_(False).train(settings.recomputes_activations)
    return base.to(torch.cuda.current_device() if uses_cuda() else "cpu")
