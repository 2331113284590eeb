"""The output head of a policy. It computes log p and entropy of sampled tokens, a few logits at a time.

It replaces the model's linear head, with the same weight and under the same name. So DeepSpeed gathers its
weight like that of any module, and checkpoints and tied embeddings do not change.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainer_service.model.head.sampled_logprobs import LogitTransform, LowRank, sampled_logprobs

logger = logging.getLogger(__name__)


@dataclass
class LogprobRequest:
    """The tokens whose log p one forward pass computes, and the head's result."""

    targets_TK: Tensor
    temperatures_T: Tensor
    entropy_gradient: bool
    undo: ExitStack = field(default_factory=ExitStack)
    head: "LogprobHead | None" = None
    """The head that computed the result; None if it returned logits, or if the model has another one."""
    result_1TK: Tensor | None = None


_current_request: ContextVar[LogprobRequest | None] = ContextVar("_current_request", default=None)


@contextmanager
def requesting_logprobs(
    targets_TK: Tensor, temperatures_T: Tensor, entropy_gradient: bool = False
) -> Iterator[LogprobRequest]:
    """Inside the context, a `LogprobHead` returns log p and entropy of these targets instead of logits."""
    request = LogprobRequest(targets_TK, temperatures_T, entropy_gradient)
    token = _current_request.set(request)
    try:
        with request.undo:
            yield request
    finally:
        _current_request.reset(token)


class LogprobHead(torch.nn.Module):
    """A linear head; inside `requesting_logprobs` it returns log p and entropy of sampled tokens instead of
    logits."""

    def __init__(self, head: torch.nn.Linear, model: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.in_features, self.out_features = head.in_features, head.out_features
        self._transform, self._neutral_attributes = logit_transform_of(model)
        self.returns_logits = False
        """Whether the model changes its logits in an unknown way, so that it needs all of them."""

    def forward(self, hidden_1TH: Tensor, low_rank: LowRank | None = None) -> Tensor:
        """`low_rank` is an adapter's part of the logits; the first dimension of its inputs is 1."""
        request = _current_request.get()
        if request is None or self.returns_logits:
            logits_1TV = torch.nn.functional.linear(hidden_1TH, self.weight, self.bias)
            return logits_1TV if low_rank is None else logits_1TV + low_rank.logits()
        if hidden_1TH.shape[:2] != (1, len(request.targets_TK)):
            raise ValueError(
                f"{len(request.targets_TK)} sampled tokens, and hidden states of {hidden_1TH.shape[1]}: "
                "the model does not support `logits_to_keep`"
            )
        for owner, name, neutral in self._neutral_attributes:
            request.undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, neutral)
        result_TK = sampled_logprobs(
            hidden_1TH[0],
            self.weight,
            self.bias,
            request.targets_TK,
            request.temperatures_T,
            self._transform,
            request.entropy_gradient,
            low_rank and low_rank.row(0),
        )
        request.head, request.result_1TK = self, result_TK.detach()[None]
        return result_TK[None]

    def was_unchanged(self, output_1TK: Tensor, result_1TK: Tensor | None) -> bool:
        """Whether the model returned the result unchanged. If not, the head returns logits from now on."""
        if result_1TK is None or not torch.equal(output_1TK.nan_to_num(), result_1TK.nan_to_num()):
            logger.warning("the model changes its logits in an unknown way: all logits are computed at once")
            self.returns_logits = True
        return not self.returns_logits

    def cut(self, columns: int | None) -> None:
        """Compute the first `columns` logits only, as the model cuts off the others; None: all."""
        self._transform = replace(self._transform, columns=columns)


def set_head(model: Any) -> None:
    """Replace the model's output head by a `LogprobHead`, if it is a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        model.set_output_embeddings(LogprobHead(head, model))
    else:
        logger.info("%s has no plain linear head: all logits are computed at once", type(model).__name__)


def logit_transform_of(model: Any) -> tuple[LogitTransform, list[tuple[Any, str, float | None]]]:
    """The change that the model makes to its logits, and the attributes (owner, name, neutral value) that
    switch it off.

    Cohere multiplies by `logit_scale`; Granite divides by `logits_scaling`; Gemma 2 caps.
    """
    config = model.config.get_text_config()
    scale = 1.0
    neutral_values: list[tuple[str, float | None]] = []
    if isinstance(factor := getattr(config, "logit_scale", None), int | float):  # MPT names a formula
        scale = float(factor)
        neutral_values.append(("logit_scale", 1.0))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = 1.0 / float(divisor)
        neutral_values.append(("logits_scaling", 1.0))
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        neutral_values.append(("final_logit_softcapping", None))
    owners = [(model if hasattr(model, name) else config, name, neutral) for name, neutral in neutral_values]
    return LogitTransform(scale, softcap), owners
