"""The model that is trained: a DeepSpeed engine around a Hugging Face model, and the reference of KL terms.

MicroBatch ─ logprobs ─▶ loss ─ backward ─▶ (more of them) ─ step ─▶ new weights ─▶ snapshot
base model ─ first use ─▶ Reference ◀─ follow ─ the policy's weights, every n steps
                              └─ copied, load ─▶ reference/model.safetensors, once it has followed
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from trainer_service.model.base_weights import BaseWeights
from trainer_service.model.checkpoint_layout import REFERENCE, Layout, LoraLayout
from trainer_service.model.critic import Critic
from trainer_service.model.export import ExportTensor, check_tensor_names
from trainer_service.model.file_copies import FileCopies, StateCopy
from trainer_service.model.forward import TokenScores, scores
from trainer_service.model.huggingface import (
    WEIGHTS,
    copy_small_files,
    enable_activation_checkpointing,
    load_base,
)
from trainer_service.model.images import image_inputs_of
from trainer_service.model.lora import Adapters, AdapterSnapshot
from trainer_service.model.optimizer import apply_configured_rates, make_optimizer, schedule_of
from trainer_service.model.packed_attention import Packing
from trainer_service.model.parallel import Parallel, random_states, restore_random_states, seed_everything
from trainer_service.model.routers import Routers, routers_of
from trainer_service.model.self_check import check_at_start
from trainer_service.model.settings import ModelSettings
from trainer_service.model.snapshot import SnapshotMemory, WeightSnapshot
from trainer_service.model.zero import (
    assign,
    deepspeed_config,
    end_failed_backward,
    gathered,
    local_part,
    offload_states,
    prepare_deepspeed,
    reference_config,
    reload_states,
    uses_cuda,
)
from trainer_service.rows.rows import MicroBatch, shortest


class Reference:
    """A second copy of the base model, loaded at its first use.

    `with reference as model` gives the model on the device; with `reference_offload` or shared memory it
    returns to the CPU afterwards. At stage 3 of ZeRO the model is a DeepSpeed engine: each rank keeps a part
    of each weight, and every rank must make each pass.
    """

    def __init__(
        self,
        deepspeed: ModuleType,
        load: Callable[[Mapping[str, object]], Any],
        settings: ModelSettings,
        device: torch.device,
    ) -> None:
        """`load` loads the base model for an engine with this configuration."""
        self._deepspeed, self._load, self._device = deepspeed, load, device
        self._config = reference_config(settings, uses_cuda())
        self._partitioned = settings.sharding_stage == 3
        self._returns = settings.reference_offload or settings.memory == "shared"
        self._model: Any = None
        self._moved = False
        """Whether the weights are no longer those of the base model."""
        self._copied = SnapshotMemory()

    def __enter__(self) -> Any:
        model = self._loaded()
        return model if self._partitioned else model.to(self._device)

    def __exit__(self, *_: object) -> None:
        if self._returns and not self._partitioned:
            self._model.to("cpu")

    def follow(self, policy: Any) -> None:
        """Take over the weights of a model of the same shape. Every rank must call it."""
        own = self._parameters()
        for name, parameter in policy.named_parameters():
            with gathered([parameter]):
                assign(own[name], parameter.data)
        self._moved = True

    def copied(self, rank: int) -> dict[str, Callable[[Path], object]]:
        """Copy the weights into the memory of rank 0's host, if they are no longer those of the base model.
        Returns what writes them into which part of a checkpoint. Every rank must call it."""
        if not self._moved:
            return {}
        tensors = [ExportTensor.of(*named) for named in self._parameters().items()]
        dtypes = {tensor.name: tensor.sources[0].dtype for tensor in tensors}
        weights = self._copied.take(tensors, dtypes, rank=rank)
        return {REFERENCE: partial(weights.write, file_bytes=sys.maxsize)}

    def load(self, directory: Path) -> None:
        """Read back what was written of the copy, or become the base model if nothing was. Every rank must
        call it."""
        path = directory / REFERENCE / WEIGHTS
        if not path.exists():
            self._model = None if self._moved else self._model
            self._moved = False
            return
        with safe_open(path, "pt") as file:
            for name, parameter in self._parameters().items():
                assign(parameter, file.get_tensor(name))
        self._moved = True

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        model = self._loaded()
        return dict((model.module if self._partitioned else model).named_parameters())

    def _loaded(self) -> Any:
        if self._model is None:
            model = self._load(self._config).eval().requires_grad_(False)
            self._model = self._engine(model) if self._partitioned else model
        return self._model

    def _engine(self, model: Any) -> Any:
        """Without an optimizer, the engine only gathers the weights of each layer for its part of a pass."""
        engine, *_ = self._deepspeed.initialize(model=model, config=self._config)
        engine.eval()
        return engine


Value = TypeVar("Value")

CRITIC = "critic"
"""The directory of the critic's shards, inside the checkpoint's directory."""
EQUAL_COST_WIDTHS = 12
"""In a row of 12 times the width of a layer, attention costs about as much as everything else."""


class DeepSpeedPolicy:
    """One rank's part of the weights, their optimizer and schedule. A process has one policy.

    All ranks must make each call together, except `logprobs` and `tensor`.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._base = BaseWeights.checked(settings.model_path)
        deepspeed = prepare_deepspeed(settings)
        seed_everything(settings.seed)
        self._parallel = Parallel.joined(settings.sequence_parallel)
        self.rank, self.ranks = self._parallel.rank, self._parallel.ranks
        self.data_ranks = self._parallel.data_ranks
        config = deepspeed_config(settings, uses_cuda())
        model = load_base(settings, config)
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._checked = check_at_start(model, settings, self._parallel)
        self.model_checks = (*self._base.checks, *self._checked.checks)
        """What was found out about the model at the start."""
        self._packing = self._checked.packing
        self.routers = routers_of(model, settings)
        if self.routers is not None and settings.sequence_parallel > 1:
            raise SystemExit("trainer.sequence_parallel: mixtures of experts are trained with 1 only")
        self.images = image_inputs_of(model, settings, self.ranks)
        # Each row of a mixture replays its own experts, and equal ids may stand for other images.
        apart = self.routers is not None or self.images is not None
        self.shares_prefixes = settings.share_prefixes and not apart and self._packing is Packing.SEGMENTS
        self._equal_cost_length = EQUAL_COST_WIDTHS * model.config.get_text_config().hidden_size
        self._entropy_gradient = settings.learns_entropy
        self._snapshots, self._copied = SnapshotMemory(), SnapshotMemory()
        self._adapters = Adapters(model, settings.lora, settings.model_path) if settings.lora else None
        if settings.recomputes_activations:
            enable_activation_checkpointing(model)
        check_tensor_names(model, self._base.dtypes, settings.model_path)
        optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad], settings)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_of(settings.optimizer)),
            config=config,
        )
        self._engine.module.train(settings.recomputes_activations)
        self._copies = FileCopies(self._engine)
        self.value_clip = settings.critic.value_clip if settings.critic else None
        self.rank_timeout_s = settings.rank_timeout_s
        sequence = self._parallel.sequence
        self._critic = (
            Critic(deepspeed, self._load_copy(config), settings, self._packing, sequence)
            if settings.critic
            else None
        )
        self._reference = Reference(deepspeed, self._load_copy, settings, self._engine.device)

    @property
    def module(self) -> Any:
        """The model that DeepSpeed trains. At stage 3 of ZeRO, this rank has a part of each weight."""
        return self._engine.module

    @property
    def layout(self) -> Layout:
        """Of which run this policy's checkpoints are, and how they are sharded."""
        settings = self._settings
        lora = (
            LoraLayout(settings.lora.rank, settings.lora.alpha, settings.lora.target_modules)
            if settings.lora
            else None
        )
        given = (self.ranks, settings.sharding_stage, settings.precision, lora, self._critic is not None)
        return Layout(*given, source="turns", base_digest=self._base.digest)

    def _load_copy(self, config: Mapping[str, object]) -> Any:
        """The base model again, to be computed like the one that was checked."""
        model = load_base(self._settings, config)
        self._checked.apply(model)
        return model

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log p [T] and entropies [T] of the trained tokens under the present weights, as in `scores`."""
        return self.scores(batch)[:2]

    def scores(self, batch: MicroBatch) -> TokenScores:
        """The scores of the trained tokens, under the present weights."""
        return self._scores(self._engine, batch, self.routers)

    def _scores(self, model: Any, batch: MicroBatch, routers: Routers | None = None) -> TokenScores:
        device, more = self._engine.device, (self._parallel.sequence, routers, self.images)
        return scores(model, batch, self._packing, device, self._entropy_gradient, *more)

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """log p [T] in nats under the reference policy. Every rank calls it, with its own micro-batch."""
        if self._adapters is not None:
            with self._adapters.disabled():
                return self._scores(self._engine, batch).lp_T
        with self._reference as model:
            return self._scores(model, batch).lp_T

    def move_reference(self) -> None:
        """The reference policy becomes the policy of now. Every rank must call it."""
        self._reference.follow(self.module)

    @property
    def critic(self) -> Critic:
        """The critic; the settings must have one."""
        assert self._critic is not None  # noqa: S101 - TrainerSettings refuses algorithms that lack a critic
        return self._critic

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the step's loss. The loss is multiplied by the number
        of ranks, because DeepSpeed averages gradients over ranks, and the step's loss is a sum."""
        try:
            self._engine.backward(loss * self.ranks, scale_wrt_gas=False)
        except RuntimeError:
            if self.ranks == 1:  # else DeepSpeed refuses the next pass, as it has some gradients of this one
                end_failed_backward(self._engine)
            raise

    def step(self, scale: float = 1.0) -> float:
        """Update the weights with `scale` times the gradient. Returns the norm of the scaled gradient before
        clipping; if it is not finite, weights and optimizer are unchanged."""
        if scale == 1:
            self._engine.step()
        else:
            self._engine.optimizer.override_loss_scale(1 / scale)
            self._engine.step()
            self._engine.optimizer.override_loss_scale(1.0)  # DeepSpeed multiplies losses by this, too
        if getattr(self._engine.optimizer, "overflow", False):
            return float("inf")  # ZeRO 3 would still report the norm of the previous step
        return float(self._engine.get_global_grad_norm())

    def discard_gradients(self) -> None:
        """Drop the gradient since the last step. It is made NaN, so that the step drops it: ZeRO has no other
        way. Every rank must call it. Raises RuntimeError if DeepSpeed made a step all the same."""
        torch.cuda.empty_cache()  # of a pass that did not fit
        self.backward(math.nan * self.logprobs(shortest())[0].sum())
        if math.isfinite(norm := self.step()):
            raise RuntimeError(
                f"DeepSpeed made a step with a gradient of NaN, and reports its norm as {norm}"
            )

    def gradient_norm(self, batch: MicroBatch, loss_of: Callable[[Tensor], Tensor]) -> float:
        """The norm of the gradient of `loss_of(logprobs)`, on all ranks. It is not added to that of the step.
        Every rank must call this with the same batch: at stage 3 they compute the gradient together."""
        logprobs_T = self._scores(self.module, batch, self.routers).lp_T
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss_of(logprobs_T), parameters, allow_unused=True)
        self._engine.empty_partition_cache()  # without this, stage 3 keeps gathered weights
        norms = [torch.linalg.vector_norm(each.float()) for each in gradients if each is not None]
        return float(self._parallel.mean(torch.linalg.vector_norm(torch.stack(norms))))

    def weights_are_finite(self) -> bool:
        """Whether every weight of every rank is finite, also those of the critic. Every rank must call it."""
        modules = [self.module, *([self._critic.module] if self._critic else [])]
        parts = [local_part(each) for module in modules for each in module.parameters()]
        non_finite = torch.tensor([not part.isfinite().all() for part in parts], dtype=torch.float32).any()
        return not bool(self._parallel.mean(non_finite.float().to(self._engine.device)))

    def own_micro_batches(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This rank's share of the micro-batches. False marks one that only keeps the number of passes equal
        on all ranks."""
        if self._packing is Packing.ONE_ROW:
            batches = [row for batch in batches for row in batch.single_rows()]
        return self._parallel.own_share(batches, self._equal_cost_length)

    def all_gather(self, values: list[Value]) -> list[Value]:
        """The values for all micro-batches of the step, on every rank. The values must be on the CPU."""
        return self._parallel.all_gather(values)

    def tensor(self, values: Any) -> Tensor:
        """A numpy array as a tensor on this rank's device."""
        return torch.from_numpy(values).to(self._engine.device)

    def snapshot(self, spread: bool = False) -> WeightSnapshot:
        """Copy the weights into host memory, with the names and dtypes of the base model's file: all of them
        on rank 0, or a share on every rank (`spread`). Each tied tensor comes once; adapters are merged.
        Every rank must call it. It overwrites the former snapshot."""
        keepers = self.ranks if spread else 1
        return self._snapshots.take(self._exported(), self._base.dtypes, rank=self.rank, keepers=keepers)

    def adapter_snapshot(self) -> AdapterSnapshot:
        """Copy the adapters alone into the memory of rank 0's host. The settings must have adapters. Every
        rank must call it. It overwrites the former one."""
        assert self._adapters is not None  # noqa: S101 - TrainerSettings refuses transport adapter without
        return self._adapters.snapshot(self._snapshots, self.rank)

    def _exported(self) -> list[ExportTensor]:
        lora = self._settings.lora
        rounds = lora is not None and lora.merge_rounding == "stochastic"
        return self._base.published(self.module, self._settings.seed if rounds else None)

    def offload_states(self) -> None:
        """Move weights and optimizer to host memory. `snapshot` and `copy_states` work there, too."""
        if self._critic is not None:
            self._critic.offload_states()
        offload_states(self._engine)

    def reload_states(self) -> None:
        """Move them back to the device, if they are in host memory."""
        reload_states(self._engine)
        if self._critic is not None:
            self._critic.reload_states()

    def copy_states(self) -> StateCopy:
        """Copy the trained weights, optimizer, schedule and the states of the random generators into host
        memory, to be written into a checkpoint. Every rank must call it. The former copy may not be
        used any more."""
        frozen = self._adapters is not None
        copied = self._copies.take({"random": random_states()}, without_frozen=frozen)
        parts: dict[str, Callable[[Path], object]] = {".": copied.write}
        if self._critic is not None:
            parts[CRITIC] = self._critic.copy_states()
        return StateCopy(parts | self._copied_weights())

    def _copied_weights(self) -> dict[str, Callable[[Path], object]]:
        """The weights without DeepSpeed's format, on rank 0: `adapter/` for PEFT, `model/` for serving, and
        a reference that has moved."""
        parts = self._reference.copied(self.rank)
        if self._adapters is not None:
            parts["adapter"] = self._adapters.snapshot(self._copied, self.rank).write
        if self._settings.checkpoint_hf:
            model = self._copied.take(self._exported(), self._base.dtypes, rank=self.rank)
            parts["model"] = partial(_write_model, self._settings.model_path, model)
        return parts if self.rank == 0 else {}

    def load(self, directory: Path, tag: str, universal: bool = False, rate_scale: float = 1.0) -> None:
        """Read back what a copy wrote with this layout, or what `universal.converted` made of another layout.
        The learning rate becomes `rate_scale` times the configured one. Raises FileNotFoundError."""
        self._engine._config.load_universal_checkpoint = universal
        path, client_state = self._engine.load_checkpoint(
            str(directory), tag=tag, load_module_strict=self._adapters is None
        )
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        apply_configured_rates(self._engine, self._settings.optimizer, rate_scale)
        if self._critic is not None:
            self._critic.load(directory, f"{tag}/{CRITIC}", rate_scale)
        if self._settings.moves_reference:
            self._reference.load(directory / tag)
        restore_random_states(client_state["random"])
        self.module.train(self._settings.recomputes_activations)
        torch.distributed.barrier()  # after it, rank 0 removes a converted checkpoint


def _write_model(base: Path, weights: WeightSnapshot, directory: Path) -> None:
    copy_small_files(base, directory)
    weights.write(directory)
