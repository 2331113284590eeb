"""The model that is trained: a DeepSpeed engine around a Hugging Face model, the reference of KL terms,
and the critic, a second model that learns the value of each token from returns.

MicroBatch ─ logprobs ─▶ loss ─ backward ─▶ (more of them) ─ step ─▶ new weights ─▶ snapshot
base model ─ first use ─▶ Reference ◀─ follow ─ the policy's weights, every n steps
                              └─ copied, load ─▶ reference/model.safetensors, once it has followed

The critic:  MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ V [T]

It begins as the base model with a head that has one output and weights of 0. After each step of the policy,
the critic makes its own step.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer_service.model.checkpoint_layout import REFERENCE, Layout, LoraLayout
from trainer_service.model.exported_tensors import ExportTensor, check_tensor_names
from trainer_service.model.forward import TokenScores, scores
from trainer_service.model.host_copies import SnapshotMemory, StateCopy, WeightSnapshot
from trainer_service.model.huggingface import (
    WEIGHTS,
    copy_small_files,
    enable_activation_checkpointing,
    load_base,
)
from trainer_service.model.images import image_inputs_of
from trainer_service.model.logprob_head import logit_transform_of
from trainer_service.model.lora import Adapters, AdapterSnapshot
from trainer_service.model.optimizer import apply_configured_rates
from trainer_service.model.packed_attention import Packing, attention_arguments
from trainer_service.model.parallel import SequenceRanks, Slice, random_states, restore_random_states
from trainer_service.model.rank_model import RankBase, TrainedEngine
from trainer_service.model.routers import Routers
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import (
    assign,
    deepspeed_config,
    full_shape,
    gathered,
    local_part,
    reference_config,
    uses_cuda,
)
from trainer_service.rows.rows import MicroBatch, shortest


class ValueHead(torch.nn.Linear):
    """A linear head with one output. The output is 0 at first, so the first advantages are the returns."""

    def __init__(self, like: Any) -> None:
        weight = like.weight
        super().__init__(full_shape(weight)[1], 1, bias=True, device=weight.device, dtype=weight.dtype)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)


def value_head(model: Any) -> None:
    """Replace the model's output head by a `ValueHead`, and switch off the changes that the model makes to
    logits after the head.

    Raises ValueError for a model whose head is not linear.
    """
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor) or len(full_shape(head.weight)) != 2:
        raise ValueError(f"{type(model).__name__} has no linear output head, and a critic needs one")
    for owner, name, neutral in logit_transform_of(model)[1]:
        setattr(owner, name, neutral)
    model.set_output_embeddings(ValueHead(head))


class Critic(TrainedEngine):
    """One rank's part of the critic. All ranks must make each call together, except `values`."""

    def __init__(
        self,
        deepspeed: ModuleType,
        model: Any,
        settings: ModelSettings,
        packing: Packing,
        sequence: SequenceRanks | None = None,
    ) -> None:
        """`model` is a copy of the base model; its head is replaced. `settings.critic` must be set. The ranks
        of `sequence` compute each micro-batch together. Raises ValueError for a model whose head is not
        linear."""
        self._sequence = sequence
        assert settings.critic is not None  # noqa: S101 - the caller checks
        own = settings.model_copy(update={"optimizer": settings.critic.optimizer})
        self._packing = packing
        value_head(model)
        if settings.recomputes_activations:
            enable_activation_checkpointing(model)
        self._optimizer = own.optimizer
        super().__init__(deepspeed, model, own)

    def values(self, batch: MicroBatch) -> Tensor:
        """V [T] float32, in units of the reward, with gradient: for each trained token, the expected sum of
        its reward and of all later rewards in its row."""
        if self._packing is Packing.ONE_ROW and len(batch.lengths_S) > 1:
            return torch.cat([self.values(row) for row in batch.single_rows()])
        device, sequence = self._engine.device, self._sequence
        part = sequence.slice_of(batch) if sequence else batch
        values_1T1 = self._engine(
            input_ids=torch.from_numpy(part.ids_N).to(device)[None],
            position_ids=torch.from_numpy(part.positions_N).to(device)[None],
            logits_to_keep=torch.from_numpy(part.predict_at_T).to(device),
            use_cache=False,
            **attention_arguments(self._packing, batch, device, sequence),
        ).logits
        values_T1: Tensor = values_1T1[0].float()
        if isinstance(part, Slice) and sequence:
            values_T1 = sequence.whole(values_T1, part, len(batch.targets_T))
        return values_T1[:, 0]

    def step(self) -> float:
        return self.make_step()

    def copy_states(self) -> Callable[[Path], None]:
        """Copy weights and optimizer into host memory. Returns what writes them into a directory."""
        return self.copied_files().write

    def load(self, directory: Path, tag: str, rate_scale: float) -> None:
        """Read back what a copy wrote, as the policy does. Raises FileNotFoundError."""
        self.read_files(directory, tag)
        apply_configured_rates(self._engine, self._optimizer, rate_scale)


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


CRITIC = "critic"
"""The directory of the critic's shards, inside the checkpoint's directory."""


class DeepSpeedPolicy(RankBase, TrainedEngine):
    """One rank's part of the weights, their optimizer and schedule. A process has one policy.

    All ranks must make each call together, except `logprobs` and `tensor`.
    """

    def __init__(self, settings: ModelSettings) -> None:
        RankBase.__init__(self, settings)
        config = deepspeed_config(settings, uses_cuda())
        model = load_base(settings, config)
        self.examine(model)
        if self.routers is not None and settings.sequence_parallel > 1:
            raise SystemExit("trainer.sequence_parallel: mixtures of experts are trained with 1 only")
        self.images = image_inputs_of(model, settings, self.ranks)
        self.shares_prefixes = self.shares_prefixes and self.images is None
        self._entropy_gradient = settings.learns_entropy
        self._snapshots, self._copied = SnapshotMemory(), SnapshotMemory()
        self._adapters = Adapters(model, settings.lora, settings.model_path) if settings.lora else None
        if settings.recomputes_activations:
            enable_activation_checkpointing(model)
        check_tensor_names(model, self.weights.dtypes, settings.model_path)
        TrainedEngine.__init__(self, self.deepspeed, model, settings)
        self._critic: Critic | None = None
        self.value_clip: float | None = None
        if settings.critic:
            copy, sequence = self._load_copy(config), self.parallel.sequence
            self._critic = Critic(self.deepspeed, copy, settings, self.packing, sequence)
            self.value_clip = settings.critic.value_clip
        self._reference = Reference(self.deepspeed, self._load_copy, settings, self._engine.device)

    @property
    def layout(self) -> Layout:
        """Of which run this policy's checkpoints are, and how they are sharded."""
        settings = self.settings
        lora = (
            LoraLayout(settings.lora.rank, settings.lora.alpha, settings.lora.target_modules)
            if settings.lora
            else None
        )
        given = (self.ranks, settings.sharding_stage, settings.precision, lora, self._critic is not None)
        return Layout(*given, source="turns", base_digest=self.weights.digest)

    def _load_copy(self, config: Mapping[str, object]) -> Any:
        """The base model again, to be computed like the one that was checked."""
        model = load_base(self.settings, config)
        self.checked.apply(model)
        return model

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log p [T] and entropies [T] of the trained tokens under the present weights, as in `scores`."""
        return self.scores(batch)[:2]

    def scores(self, batch: MicroBatch) -> TokenScores:
        """The scores of the trained tokens, under the present weights."""
        return self._scores(self._engine, batch, self.routers)

    def _scores(self, model: Any, batch: MicroBatch, routers: Routers | None = None) -> TokenScores:
        device, more = self._engine.device, (self.parallel.sequence, routers, self.images)
        return scores(model, batch, self.packing, device, self._entropy_gradient, *more)

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

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._engine.get_lr()[0])

    def step(self, scale: float = 1.0) -> float:
        """As `make_step`, with `scale` times the gradient."""
        if scale == 1:
            return self.make_step()
        self._engine.optimizer.override_loss_scale(1 / scale)
        norm = self.make_step()
        self._engine.optimizer.override_loss_scale(1.0)  # DeepSpeed multiplies losses by this, too
        return norm

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
        return float(self.parallel.mean(torch.linalg.vector_norm(torch.stack(norms))))

    def weights_are_finite(self) -> bool:
        """Whether every weight of every rank is finite, also those of the critic. Every rank must call it."""
        modules = [self.module, *([self._critic.module] if self._critic else [])]
        parts = [local_part(each) for module in modules for each in module.parameters()]
        non_finite = torch.tensor([not part.isfinite().all() for part in parts], dtype=torch.float32).any()
        return not bool(self.parallel.mean(non_finite.float().to(self._engine.device)))

    def snapshot(self, spread: bool = False) -> WeightSnapshot:
        """Copy the weights into host memory, with the names and dtypes of the base model's file: all of them
        on rank 0, or a share on every rank (`spread`). Each tied tensor comes once; adapters are merged.
        Every rank must call it. It overwrites the former snapshot."""
        keepers = self.ranks if spread else 1
        return self._snapshots.take(self._exported(), self.weights.dtypes, rank=self.rank, keepers=keepers)

    def adapter_snapshot(self) -> AdapterSnapshot:
        """Copy the adapters alone into the memory of rank 0's host. The settings must have adapters. Every
        rank must call it. It overwrites the former one."""
        assert self._adapters is not None  # noqa: S101 - TrainerSettings refuses transport adapter without
        return self._adapters.snapshot(self._snapshots, self.rank)

    def _exported(self) -> list[ExportTensor]:
        lora = self.settings.lora
        rounds = lora is not None and lora.merge_rounding == "stochastic"
        return self.weights.published(self.module, self.settings.seed if rounds else None)

    def offload_states(self) -> None:
        if self._critic is not None:
            self._critic.offload_states()
        super().offload_states()

    def reload_states(self) -> None:
        super().reload_states()
        if self._critic is not None:
            self._critic.reload_states()

    def copy_states(self) -> StateCopy:
        """Copy the trained weights, optimizer, schedule and the states of the random generators into host
        memory, to be written into a checkpoint. The rules of `FileCopies.take` hold."""
        frozen = self._adapters is not None
        copied = self.copied_files({"random": random_states()}, without_frozen=frozen)
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
        if self.settings.checkpoint_hf:
            model = self._copied.take(self._exported(), self.weights.dtypes, rank=self.rank)
            parts["model"] = partial(_write_model, self.settings.model_path, model)
        return parts if self.rank == 0 else {}

    def load(self, directory: Path, tag: str, universal: bool = False, rate_scale: float = 1.0) -> None:
        """Read back what a copy wrote with this layout, or what `converted` made of another layout.
        The learning rate becomes `rate_scale` times the configured one. Raises FileNotFoundError."""
        strict = self._adapters is None
        beside = self.read_files(directory, tag, universal=universal, load_module_strict=strict)
        apply_configured_rates(self._engine, self.settings.optimizer, rate_scale)
        if self._critic is not None:
            self._critic.load(directory, f"{tag}/{CRITIC}", rate_scale)
        if self.settings.moves_reference:
            self._reference.load(directory / tag)
        restore_random_states(beside["random"])
        torch.distributed.barrier()  # after it, rank 0 removes a converted checkpoint


def _write_model(base: Path, weights: WeightSnapshot, directory: Path) -> None:
    copy_small_files(base, directory)
    weights.write(directory)
