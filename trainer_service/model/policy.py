"""The model that learns: a DeepSpeed engine around a Hugging Face model.

MicroBatch ─ logprobs ─▶ loss ─ backward ─▶ (more of them) ─ step ─▶ new weights ─ export ─▶ safetensors
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer_service.model.critic import Critic
from trainer_service.model.dropout import without_dropout
from trainer_service.model.export import model_pieces, write_pieces
from trainer_service.model.forward import forward
from trainer_service.model.huggingface import (
    WEIGHTS,
    copy_small_files,
    enable_activation_checkpointing,
    tensor_dtypes,
)
from trainer_service.model.layout import Layout
from trainer_service.model.logprob_head import set_head
from trainer_service.model.lora import Adapters
from trainer_service.model.optimizer import as_configured, make_optimizer
from trainer_service.model.packed_attention import Packing, packing_of, set_attention
from trainer_service.model.randomness import random_states, restore_random_states, seed_everything
from trainer_service.model.reference import Reference
from trainer_service.model.schedule import schedule_of
from trainer_service.model.zero import deepspeed_config, own_part, prepare_deepspeed
from trainer_service.rows.rows import MicroBatch, shared_out
from trainer_service.settings import TrainerSettings

Value = TypeVar("Value")

CRITIC = "critic"
"""Its shards, within those of the policy."""
EVEN_AT_WIDTHS = 12
"""The attention to n tokens costs about as much as all else at n = 12 times the width of a layer."""


class Policy:
    """The weights, their optimizer and schedule. One per process; several ranks hold one each."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        deepspeed = prepare_deepspeed(settings)
        seed_everything(settings.seed)
        model = self._load_base()
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._packing = packing_of(model)
        self._even_at = EVEN_AT_WIDTHS * model.config.get_text_config().hidden_size
        self._entropy_gradient = settings.algorithm.entropy_bonus > 0
        self._published_dtypes = tensor_dtypes(settings.model_path)
        self._adapters = Adapters(model, settings.lora, settings.model_path) if settings.lora else None
        if settings.activation_checkpointing:
            enable_activation_checkpointing(model)
        self._can_be_published(model)
        optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad], settings)
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_of(settings.optimizer)),
            config=deepspeed_config(settings),
        )
        self._engine.module.train(settings.activation_checkpointing)
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.value_clip = settings.critic.value_clip if settings.critic else None
        self._critic = Critic(deepspeed, self._load_base(), settings) if settings.critic else None
        self._reference = Reference(self._load_base, self._engine.device, settings.reference_offload)

    def _can_be_published(self, model: Any) -> None:
        """Raises SystemExit for a model whose weights have other names in memory than in its files."""
        if missing := {piece.name for piece in model_pieces(model)} - set(self._published_dtypes):
            raise SystemExit(
                f"trainer.model_path: {self._settings.model_path} has no tensor {sorted(missing)[0]}, as the "
                "loaded model names it; such a model, of fused experts for instance, cannot be published"
            )

    @property
    def layout(self) -> Layout:
        """How this policy's checkpoints are cut."""
        lora = self._settings.lora.model_dump() if self._settings.lora else None
        return Layout(
            self.ranks, self._settings.zero_stage, self._settings.dtype, lora, self._critic is not None
        )

    def _load_base(self) -> Any:
        on_cuda = torch.distributed.get_backend() == "nccl"
        model = load_model(self._settings.model_path, getattr(torch, self._settings.dtype), on_cuda)
        without_dropout(model)
        return model

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log p [T] of the trained tokens under the present weights, with gradient, and the entropies [T],
        with gradient where the algorithm has a bonus for them."""
        return self._forward(self._engine, batch)

    def _forward(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return forward(model, batch, self._packing, self._engine.device, self._entropy_gradient)

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """log p [T] of the trained tokens under the base model, as it was before any training. Every rank has
        to ask for it, with a micro-batch of its own."""
        if self._adapters is not None:
            with self._adapters.switched_off():
                return self._forward(self._engine, batch)[0]
        with self._reference as model:
            return self._forward(model, batch)[0]

    @property
    def critic(self) -> Critic:
        assert self._critic is not None  # noqa: S101 - TrainerSettings knows who asks one
        return self._critic

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the step's loss. DeepSpeed averages over ranks, and
        the share is of a sum over all of them."""
        self._engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self, scale: float = 1.0) -> float:
        """Update the weights by `scale` times the gradient. Returns the norm of that before it was clipped;
        where it is not finite, weights and optimizer are as they were."""
        if scale == 1:
            self._engine.step()
        else:
            self._engine.optimizer.override_loss_scale(1 / scale)
            self._engine.step()
            self._engine.optimizer.override_loss_scale(1.0)  # it is what losses are multiplied by, too
        if getattr(self._engine.optimizer, "overflow", False):
            return float("inf")  # ZeRO 3 has the norm of the step before
        return float(self._engine.get_global_grad_norm())

    def forget(self, batch: MicroBatch) -> None:
        """Drop the gradient that was added since the last step, as a step does that finds it not finite: no
        stage of ZeRO knows another way to drop all of it. `batch` is any; every rank has to call it."""
        self.backward(math.nan * self.logprobs(batch)[0].sum())
        if math.isfinite(norm := self.step()):
            raise RuntimeError(
                f"DeepSpeed made a step of a gradient that is NaN, and says its norm is {norm}"
            )

    def gradient_norm(self, batch: MicroBatch, loss_of: Callable[[Tensor], Tensor]) -> float:
        """The norm of the gradient of what `loss_of` makes of the logprobs. It is added to nothing. Every
        rank has to call it with the same batch, and hears the same: at stage 3 they compute it together."""
        logprobs_T, _ = self._forward(self._engine.module, batch)
        parameters = [each for each in self._engine.module.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss_of(logprobs_T), parameters, allow_unused=True)
        self._engine.empty_partition_cache()  # at stage 3 DeepSpeed waits for the rest of a backward pass
        norms = [torch.linalg.vector_norm(each.float()) for each in gradients if each is not None]
        return float(self._agreed(torch.linalg.vector_norm(torch.stack(norms))))

    def finite(self) -> bool:
        """Whether every weight of every rank is a number, the critic's too. Every rank has to ask."""
        modules = [self._engine.module, *([self._critic.module] if self._critic else [])]
        parts = [own_part(each) for module in modules for each in module.parameters()]
        spoilt = torch.tensor([not part.isfinite().all() for part in parts], dtype=torch.float32).any()
        return not bool(self._agreed(spoilt.float().to(self._engine.device)))

    def _agreed(self, value: Tensor) -> Tensor:
        """The mean over ranks: the same on all of them, and finite when every rank's value is."""
        if self.ranks > 1:
            torch.distributed.all_reduce(value)
        return value / self.ranks

    def share(self, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, bool]]:
        """This rank's micro-batches, as many as every rank has, the costliest first; False for one that is
        there for the number alone. Ranks reduce their gradients together, so none may have a pass more than
        another, and they wait for the slowest."""
        if self._packing is Packing.ALONE:
            batches = [row for batch in batches for row in batch.apart()]
        shares = shared_out([batch.cost(self._even_at) for batch in batches], self.ranks)
        own = [(batches[index], True) for index in shares[self.rank]]
        cheapest = min(batches, key=lambda batch: batch.cost(self._even_at))
        return own + [(cheapest, False)] * (max(map(len, shares)) - len(own))

    def everybody(self, values: list[Value]) -> list[Value]:
        """What all ranks say, on each of them, rank by rank. On the CPU."""
        if self.ranks == 1:
            return values
        told: list[list[Value]] = [[]] * self.ranks
        torch.distributed.all_gather_object(told, values)
        return [value for part in told for value in part]

    def tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self._engine.device)

    def export(self, path: Path | None) -> None:
        """Write the weights as the base model has them: same names, same dtypes, a tied tensor once; adapters
        are merged. Every rank has to call it, one of them with a path."""
        self._write(path)

    def _write(self, path: Path | None) -> None:
        write_pieces(path, list(model_pieces(self._engine.module)), self._published_dtypes)

    def save(self, directory: Path, tag: str) -> None:
        """Write weights, optimizer, schedule and the random generators' states below `directory`/`tag`: of
        the weights, those that are trained."""
        self._engine.save_checkpoint(
            str(directory),
            tag=tag,
            client_state={"random": random_states()},
            save_latest=False,
            exclude_frozen_parameters=self._adapters is not None,
        )
        if self._critic is not None:
            self._critic.save(directory, f"{tag}/{CRITIC}")
        self._save_hf(directory / tag if self.rank == 0 else None)
        torch.distributed.barrier()  # DeepSpeed returns on one rank before another has written its shard

    def _save_hf(self, directory: Path | None) -> None:
        """The same weights for those who know no DeepSpeed: `model/` to serve, `adapter/` for PEFT."""
        if self._adapters is not None:
            self._adapters.write(made(directory, "adapter"))
        if self._settings.checkpoint_hf:
            model = made(directory, "model")
            if model is not None:
                copy_small_files(self._settings.model_path, model)
            self._write(model / WEIGHTS if model else None)

    def load(self, directory: Path, tag: str, universal: bool = False) -> None:
        """Read back what `save` wrote with this layout, or what `universal.converted` made of another."""
        self._engine._config.load_universal_checkpoint = universal
        path, client_state = self._engine.load_checkpoint(
            str(directory), tag=tag, load_module_strict=self._adapters is None
        )
        if path is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag} in {directory}")
        as_configured(self._engine, self._settings.optimizer)
        if self._critic is not None:
            self._critic.load(directory, f"{tag}/{CRITIC}")
        restore_random_states(client_state["random"])
        self._engine.module.train(self._settings.activation_checkpointing)
        torch.distributed.barrier()  # rank 0 removes what was converted


def made(directory: Path | None, name: str) -> Path | None:
    """A directory within one, on the rank that writes."""
    if directory is None:
        return None
    (directory / name).mkdir()
    return directory / name


def load_model(path: Path, dtype: torch.dtype, on_cuda: bool = False) -> Any:
    """A model that keeps packed rows apart, and whose head makes log-probabilities of sampled tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    set_attention(model, flash=on_cuda and dtype is torch.bfloat16)
    set_head(model)
    return model
