"""The output head of a policy: log p and entropy of sampled tokens, never all of their logits at once.

    hidden states [T, H] ─ some at a time ─▶ logits ─▶ log p, entropy [T, 2]        logits are forgotten
    gradient of [T, 2]   ─ some at a time ─▶ logits again ─▶ gradients of hidden states and weight

It stands in the model in place of the head that it was made of, with its weight and under its name. So
DeepSpeed gathers the weight around it as around any module, and checkpoints and tied embeddings know nothing
of it.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 2**24
"""How many exist at a time: 64 MiB of float32, and as much again for their probabilities."""
WEIGHTS_AT_ONCE = 2**22
"""How many of a half-precision weight are widened at a time, where no kernel multiplies into float32."""


@dataclass
class Asked:
    """What is wanted of one forward pass, and what came of it."""

    targets_T: Tensor
    temperatures_T: Tensor
    entropy_gradient: bool
    undo: ExitStack = field(default_factory=ExitStack)
    head: "SampledHead | None" = None
    """Which answered; None when the model's head is not ours, or gave logits."""
    answer_1T2: Tensor | None = None


_asked: ContextVar[Asked | None] = ContextVar("_asked", default=None)


@contextmanager
def asking(targets_T: Tensor, temperatures_T: Tensor, entropy_gradient: bool = False) -> Iterator[Asked]:
    """Within, a `SampledHead` answers with log p and entropy of these targets instead of logits."""
    asked = Asked(targets_T, temperatures_T, entropy_gradient)
    token = _asked.set(asked)
    try:
        with asked.undo:
            yield asked
    finally:
        _asked.reset(token)


@dataclass(frozen=True)
class Reshaping:
    """What a model does to its logits after the head: we do it in ours, and it not at all."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits_CV: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = (logits_CV / self.softcap).tanh_() * self.softcap
        return logits_CV

    def gradient(self, made_CV: Tensor, gradient_CV: Tensor) -> Tensor:
        """Of the logits, from that of what was made of them."""
        if self.softcap is not None:
            gradient_CV = gradient_CV * (1 - (made_CV / self.softcap) ** 2)
        return gradient_CV * self.scale if self.scale != 1.0 else gradient_CV


class SampledHead(torch.nn.Module):
    """A linear head, and inside `asking` log p and entropy of sampled tokens."""

    def __init__(self, head: torch.nn.Linear, model: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.in_features, self.out_features = head.in_features, head.out_features
        self._reshaping, self._muted = reshaping_of(model)
        self._plain = False
        """True once the model turned out to change its logits in a way that we do not know."""

    def forward(self, hidden_1TH: Tensor) -> Tensor:
        asked = _asked.get()
        if asked is None or self._plain:
            return torch.nn.functional.linear(hidden_1TH, self.weight, self.bias)
        if hidden_1TH.shape[:2] != (1, len(asked.targets_T)):
            raise ValueError(
                f"{len(asked.targets_T)} sampled tokens, and hidden states of {hidden_1TH.shape[1]}: "
                "the model does not know `logits_to_keep`"
            )
        for owner, name, neutral in self._muted:
            asked.undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, neutral)
        answer_T2 = sampled(
            hidden_1TH[0],
            self.weight,
            self.bias,
            asked.targets_T,
            asked.temperatures_T,
            self._reshaping,
            asked.entropy_gradient,
        )
        asked.head, asked.answer_1T2 = self, answer_T2.detach()[None]
        return answer_T2[None]

    def trusts(self, made_1T2: Tensor, answer_1T2: Tensor | None) -> bool:
        """Whether the model gave back what this head answered; if not, the head gives logits from now on."""
        if answer_1T2 is None or not torch.equal(made_1T2.nan_to_num(), answer_1T2.nan_to_num()):
            logger.warning("the model changes its logits in a way of its own: they are computed all at once")
            self._plain = True
        return not self._plain


def set_head(model: Any) -> None:
    """Put a `SampledHead` in the place of the model's output head, if that is a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        model.set_output_embeddings(SampledHead(head, model))
    else:
        logger.info("%s has a head of its own: all logits are computed at once", type(model).__name__)


def reshaping_of(model: Any) -> tuple[Reshaping, list[tuple[Any, str, float | None]]]:
    """What the model does to its logits, and which attributes to set to what so that it does not.

    Cohere multiplies by `logit_scale`; Granite divides by `logits_scaling`; Gemma 2 caps.
    """
    config = model.config.get_text_config()
    scale = 1.0
    muted: list[tuple[str, float | None]] = []
    if (factor := getattr(config, "logit_scale", None)) is not None:
        scale = float(factor)
        muted.append(("logit_scale", 1.0))
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale = 1.0 / float(divisor)
        muted.append(("logits_scaling", 1.0))
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap is not None:
        muted.append(("final_logit_softcapping", None))
    owners = [(model if hasattr(model, name) else config, name, neutral) for name, neutral in muted]
    return Reshaping(scale, softcap), owners


def sampled(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperatures_T: Tensor,
    reshaping: Reshaping | None = None,
    entropy_gradient: bool = False,
) -> Tensor:
    """[T, 2]: log p of each target and the entropy, in nats, at the temperature that it was sampled with
    (`logits.logp_entropy_T*`). In float32 whatever the hidden states are; in float64 if they are.

    The entropy has a gradient only when asked: dH/dz = -p (log p + H).
    """
    given = (hidden_TH, weight_VH, bias_V, targets_T, temperatures_T)
    made: Tensor = _Sampled.apply(*given, reshaping or Reshaping(), entropy_gradient)  # type: ignore[no-untyped-call]
    return made


class _Sampled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperatures_T: Tensor,
        reshaping: Reshaping,
        entropy_gradient: bool,
    ) -> Tensor:
        made_T2 = hidden_TH.new_empty(len(hidden_TH), 2, dtype=_wide(hidden_TH))
        normaliser_T = made_T2.new_empty(len(hidden_TH))
        for some in _chunks(hidden_TH, weight_VH):
            z_CV = reshaping(_logits(hidden_TH[some], weight_VH, bias_V))
            z_CV = z_CV.div_(temperatures_T[some, None])
            normaliser_C = torch.logsumexp(z_CV, dim=1)
            logp_CV = z_CV.sub_(normaliser_C[:, None])
            made_T2[some, 0] = logp_CV.gather(1, targets_T[some, None])[:, 0]
            made_T2[some, 1] = -torch.linalg.vecdot(logp_CV.exp(), logp_CV)
            normaliser_T[some] = normaliser_C
        # The weight itself, as DeepSpeed's own linear layer saves it: by the backward pass it is whole again.
        ctx.save_for_backward(
            hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, normaliser_T, made_T2[:, 1].clone()
        )
        ctx.reshaping, ctx.entropy_gradient = reshaping, entropy_gradient
        return made_T2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T2: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, normaliser_T, entropy_T = ctx.saved_tensors
        wide = _wide(hidden_TH)
        of_hidden = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias_V, dtype=wide) if ctx.needs_input_grad[2] else None
        for some in _chunks(hidden_TH, weight_VH):
            made_CV = ctx.reshaping(_logits(hidden_TH[some], weight_VH, bias_V))
            logp_CV = (made_CV / temperatures_T[some, None]).sub_(normaliser_T[some, None])
            gradient_CV = _of_logits(
                logp_CV, targets_T[some], gradient_T2[some], entropy_T[some] if ctx.entropy_gradient else None
            ).div_(temperatures_T[some, None])
            gradient_CV = ctx.reshaping.gradient(made_CV, gradient_CV)
            if of_bias is not None:
                of_bias += gradient_CV.sum(0)
            gradient_CV = gradient_CV.to(weight_VH.dtype)
            if of_hidden is not None:
                of_hidden[some] = gradient_CV @ weight_VH
            if of_weight is not None:
                _add_product(of_weight, gradient_CV, hidden_TH[some])
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight_VH.dtype),
            None if of_bias is None else of_bias.to(bias_V.dtype),
            *(None,) * 4,
        )


def _of_logits(logp_CV: Tensor, targets_C: Tensor, gradient_C2: Tensor, entropy_C: Tensor | None) -> Tensor:
    """dL/dz = g (1[target] - p) - e p (log p + H), of g = dL/d log p and e = dL/dH."""
    g_C = gradient_C2[:, 0]
    if entropy_C is None:
        gradient_CV = logp_CV.exp_().mul_(-g_C[:, None])
    else:
        e_C = gradient_C2[:, 1]
        p_CV = logp_CV.exp()
        gradient_CV = logp_CV.add_(entropy_C[:, None]).mul_(e_C[:, None]).add_(g_C[:, None]).mul_(p_CV).neg_()
    return gradient_CV.scatter_add_(1, targets_C[:, None], g_C[:, None])


def _add_product(sum_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    if sum_VH.dtype == gradient_CV.dtype:
        sum_VH.addmm_(gradient_CV.T, hidden_CH)
    else:
        sum_VH += gradient_CV.T @ hidden_CH


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """hidden · weightᵀ + bias in float32, never rounded to the half precision that the two may have."""
    wide = _wide(hidden_CH)
    if weight_VH.dtype == wide:
        logits_CV = hidden_CH.to(wide) @ weight_VH.T
    elif hidden_CH.is_cuda:
        logits_CV = torch.mm(hidden_CH, weight_VH.T, out_dtype=wide)
    else:
        rows = max(1, WEIGHTS_AT_ONCE // weight_VH.shape[1])
        logits_CV = hidden_CH.new_empty(len(hidden_CH), len(weight_VH), dtype=wide)
        for start in range(0, len(weight_VH), rows):
            some = slice(start, start + rows)
            logits_CV[:, some] = hidden_CH.to(wide) @ weight_VH[some].to(wide).T
    return logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _chunks(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    size = max(1, LOGITS_AT_ONCE // len(weight_VH))
    for start in range(0, len(hidden_TH), size):
        yield slice(start, start + size)


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
