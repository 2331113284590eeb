"""What the checks of the base model found, and how the model and its copies are computed for it."""

from dataclasses import dataclass
from typing import Any

from rollout_queue.protocol.model_checks import ModelCheck
from trainer_service.model.attention.packed_attention import Packing, use_own_attention
from trainer_service.model.head.logprob_head import LogprobHead


class ModelUnfit(SystemExit):
    """The base model cannot be trained. The message is for the operator."""

    def __init__(self, check: ModelCheck) -> None:
        super().__init__(f"trainer.model_path: {check.detail}")
        self.check = check


@dataclass(frozen=True)
class CheckedModel:
    """How the base model and its copies are computed."""

    packing: Packing
    columns: int | None
    """The number of logits that the model keeps of its head's; None: all."""
    needs_all_logits: bool
    """Whether log-probabilities are computed from the model's own logits, all at once."""
    checks: tuple[ModelCheck, ...]

    def apply(self, model: Any) -> None:
        """Let a copy of the base model be computed like the one that was checked."""
        if self.packing is Packing.ONE_ROW:
            use_own_attention(model)
        head = model.get_output_embeddings()
        if isinstance(head, LogprobHead):
            head.returns_logits = self.needs_all_logits
            head.cut(self.columns)


def first_words(error: Exception) -> str:
    """What an exception says, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
