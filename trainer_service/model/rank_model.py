"""What one rank has of every model that it trains, whether by turns or by commands.

    RankBase       the base model, checked, and the rank's place among all ranks: its share of micro-batches
    TrainedEngine  a model under DeepSpeed: backward ─▶ (more of them) ─ step ─▶ new weights; its files

All ranks make each call together, except `tensor`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.host_copies import CopiedFiles, FileCopies
from trainer_service.model.optimizer import make_optimizer, schedule_of
from trainer_service.model.packed_attention import Packing
from trainer_service.model.parallel import Parallel, seed_everything
from trainer_service.model.routers import routers_of
from trainer_service.model.self_check import check_at_start
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import (
    deepspeed_config,
    end_failed_backward,
    offload_states,
    prepare_deepspeed,
    reload_states,
    uses_cuda,
)
from trainer_service.rows.rows import MicroBatch

EQUAL_COST_WIDTHS = 12
"""In a row of 12 times the width of a layer, attention costs about as much as everything else."""


class RankBase:
    """A rank in the process group, and what it knows of the base model."""

    def __init__(self, settings: ModelSettings) -> None:
        """Join the process group. The base model is loaded after this."""
        self.settings = settings
        self.weights = BaseWeights.checked(settings.model_path)
        self.deepspeed = prepare_deepspeed(settings)
        seed_everything(settings.seed)
        self.parallel = Parallel.joined(settings.sequence_parallel)
        self.rank, self.ranks = self.parallel.rank, self.parallel.ranks
        self.all_gather = self.parallel.all_gather
        self.data_ranks, self.rank_timeout_s = self.parallel.data_ranks, settings.rank_timeout_s

    def examine(self, model: Any) -> None:
        """Check the base model, which has been loaded. Raises SystemExit for one that cannot be trained."""
        settings = self.settings
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.checked = check_at_start(model, settings, self.parallel)
        self.model_checks = (*self.weights.checks, *self.checked.checks)
        """What was found out about the model at the start."""
        self.packing = self.checked.packing
        self.routers = routers_of(model, settings)
        # Each row of a mixture replays its own experts.
        alike = self.routers is None and self.packing is Packing.SEGMENTS
        self.shares_prefixes = settings.share_prefixes and alike
        self._equal_cost_length = EQUAL_COST_WIDTHS * model.config.get_text_config().hidden_size

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This rank's share of the micro-batches. False marks one that only keeps the number of passes equal
        on all ranks."""
        if self.packing is Packing.ONE_ROW:
            batches = [row for batch in batches for row in batch.single_rows()]
        return self.parallel.own_share(batches, self._equal_cost_length)


class TrainedEngine:
    """A model with its optimizer, and perhaps a schedule of learning rates, as DeepSpeed trains it."""

    def __init__(
        self, deepspeed: ModuleType, module: Any, settings: ModelSettings, *, scheduled: bool = True
    ) -> None:
        self._recomputes = settings.recomputes_activations
        optimizer = make_optimizer([each for each in module.parameters() if each.requires_grad], settings)
        schedule = schedule_of(settings.optimizer)
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if scheduled else None,
            config=deepspeed_config(settings, uses_cuda()),
        )
        self._engine.module.train(self._recomputes)
        self._files = FileCopies(self._engine)
        self._world = torch.distributed.get_world_size()

    @property
    def module(self) -> Any:
        """The model that DeepSpeed trains. At stage 3 of ZeRO, this rank has a part of each weight."""
        return self._engine.module

    def tensor(self, values: Any) -> Tensor:
        """A numpy array as a tensor on this rank's device."""
        return torch.from_numpy(values).to(self._engine.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the step's loss. The loss is multiplied by the number
        of ranks, because DeepSpeed averages gradients over ranks, and the step's loss is a sum."""
        try:
            self._engine.backward(loss * self._world, scale_wrt_gas=False)
        except RuntimeError:
            if self._world == 1:  # else DeepSpeed refuses the next pass, as it has some gradients of this one
                end_failed_backward(self._engine)
            raise

    def make_step(self) -> float:
        """Update the weights. Returns the norm of the gradient before clipping; if it is not finite, weights
        and optimizer are unchanged. In either case, no gradient is left."""
        self._engine.step()
        if getattr(self._engine.optimizer, "overflow", False):
            return float("inf")  # ZeRO 3 would still report the norm of the previous step
        return float(self._engine.get_global_grad_norm())

    def offload_states(self) -> None:
        """Move weights and optimizer to host memory. Snapshots and copies work there, too."""
        offload_states(self._engine)

    def reload_states(self) -> None:
        """Move them back to the device, if they are in host memory."""
        reload_states(self._engine)

    def copied_files(
        self, beside: Mapping[str, object] | None = None, *, without_frozen: bool = False
    ) -> CopiedFiles:
        """This rank's files of a checkpoint, in host memory, with what else they have `beside`."""
        return self._files.take(dict(beside or {}), without_frozen=without_frozen)

    def read_files(self, directory: Path, tag: str, *, universal: bool = False, **how: bool) -> Any:
        """Read back what a copy wrote, or with `universal` what `converted` made of another layout. Returns
        what was beside it. Raises FileNotFoundError."""
        self._engine._config.load_universal_checkpoint = universal
        path, beside = self._engine.load_checkpoint(str(directory), tag=tag, **how)
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        self._engine.module.train(self._recomputes)
        return beside
