"""The critic: a second model that learns the value of each token from returns.

    MicroBatch ─ attention row by row ─▶ hidden states ─ those that predict a trained token ─▶ V [T]

It begins as the base model with a head that has one output and weights of 0. After each step of the policy,
the critic makes its own step.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer_service.model.huggingface import enable_activation_checkpointing
from trainer_service.model.logprob_head import logit_transform_of
from trainer_service.model.optimizer import apply_configured_rates
from trainer_service.model.packed_attention import Packing, attention_arguments
from trainer_service.model.parallel import SequenceRanks, Slice
from trainer_service.model.rank_model import TrainedEngine
from trainer_service.model.settings import ModelSettings
from trainer_service.model.zero import full_shape
from trainer_service.rows.rows import MicroBatch


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
