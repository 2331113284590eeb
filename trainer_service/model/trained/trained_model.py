"""One model with its DeepSpeed engine: its passes, its optimizer steps, and its files.

MicroBatch ─ scores ─▶ loss ─ backward ─▶ (more of them) ─ step(rates) ─▶ new weights ─▶ copy_states, snapshot
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rollout_queue.commands.command import OptimStep
from trainer_service.model.attention.packed_attention import Packing
from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.forward import TokenScores, scores
from trainer_service.model.lora import Adapters, AdapterSnapshot
from trainer_service.model.optimizer import make_optimizer, set_rates
from trainer_service.model.settings import ModelSettings
from trainer_service.model.sharding.file_copies import FileCopies
from trainer_service.model.sharding.parallel import Parallel
from trainer_service.model.sharding.zero import deepspeed_config, end_failed_backward, uses_cuda
from trainer_service.model.snapshot import SnapshotMemory, WeightSnapshot
from trainer_service.model.trained.adapted import AdaptedModel
from trainer_service.rows.rows import MicroBatch
from trainer_service.rows.shortest import shortest

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

    def discard_gradients(self) -> None:
        """Drop the gradient since the last step. It is made NaN, so that the step drops it: no stage of ZeRO
        has another way to drop all of it. Raises RuntimeError if DeepSpeed made a step all the same."""
        self.backward(math.nan * self.scores(shortest()).lp_T.sum())
        if math.isfinite(norm := self.step(OptimStep(0.0, 0.9, 0.95, 1e-8, 0.0, 0.0))):
            raise RuntimeError(f"DeepSpeed made a step with a gradient of NaN: norm {norm}")

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
